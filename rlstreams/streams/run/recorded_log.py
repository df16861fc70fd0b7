"""A recording as a run's log: records of groups are found by their keys, without other reads."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlstreams.streams.log.record import RawRecord
from rlstreams.streams.log.topics import Topic
from rlstreams.streams.recording.manifest import MANIFEST_FILE
from rlstreams.streams.run.run_log import RunLog


class RecordedLog(RunLog):
    """The port `RunLog` on a recording; partitions follow each other by time.

    Args:
        folder: the recording's.

    Raises:
        RecordingError: no recording, one of another format, or one that was damaged.
    """

    def __init__(self, folder: Path | str) -> None:
        from rlstreams.streams.recording import Recording
        from rlstreams.streams.recording.bus import RecordingBus

        self.name = str(folder)
        self.recording = Recording(folder)
        self.bus = RecordingBus(self.recording)

    @property
    def problems(self) -> tuple[str, ...]:
        """See `RunLog`: files that are missing or were cut."""
        return tuple(self.recording.problems)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """See `RunLog`: from the manifest, for the claim itself may not be recorded."""
        text = self.recording.manifest.config
        return json.loads(text) if text else {}

    def records(self, topic: Topic, groups: Collection[str] | None = None) -> Iterator[RawRecord]:
        """See `RunLog`.

        Raises:
            DamagedError: bytes that are needed were changed; names the file.
        """
        if groups is None:
            yield from self.recording.records([topic.name])
        else:
            yield from self.recording.keyed(topic.name, {group.encode() for group in groups})

    def close(self) -> None:
        """Release the files; idempotent."""
        self.recording.close()


def is_recording(folder: Path | str) -> bool:
    """Whether a folder holds a recording, whole or not.

    A checkpoint's `manifest.json` has the same name, but a `weight_hash`.
    """
    try:
        found = json.loads((Path(folder) / MANIFEST_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError, RecursionError):  # its reader reports what is wrong with it
        return True
    return not (isinstance(found, dict) and "weight_hash" in found)
