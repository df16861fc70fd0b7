"""A recording as a run's log: groups are found by its index, nothing else is read."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlstreams.streams.log.record import RawRecord
from rlstreams.streams.log.topic import Topic
from rlstreams.streams.recording import Recording
from rlstreams.streams.recording.bus import RecordingBus
from rlstreams.streams.recording.manifest import MANIFEST_FILE
from rlstreams.streams.run.run_log import RunLog


class RecordedLog(RunLog):
    """The port `RunLog` on a recording; partitions follow each other by time.

    Args:
        folder: of the recording.

    Raises:
        RecordingError: no recording, one of a newer format, or one that was damaged.
    """

    def __init__(self, folder: Path | str) -> None:
        self.name = str(folder)
        self.recording = Recording(folder)
        self.bus = RecordingBus(self.recording)

    @property
    def problems(self) -> tuple[str, ...]:
        """See `RunLog`: files of it that are missing or were cut."""
        return self.recording.problems

    @property
    def configuration(self) -> Mapping[str, Any]:
        """See `RunLog`: as it was written down; the claim itself may not be recorded."""
        text = self.recording.manifest.config
        return json.loads(text) if text else {}

    def records(self, topic: Topic, groups: Collection[str] | None = None) -> Iterator[RawRecord]:
        """See `RunLog`.

        Raises:
            DamagedError: a block that is needed was changed; names it.
        """
        if groups is None:
            yield from self.recording.records([topic.name])
            return
        # A step's record is of no group: the index knows those that the topic is keyed by.
        for group in sorted(groups):
            for entry in self.recording.index.by_id(group, topic=topic.name):
                yield self.recording.read(entry)

    def close(self) -> None:
        """Release the files; idempotent."""
        self.recording.close()


def is_recording(folder: Path | str) -> bool:
    """Whether a folder holds a recording, whole or not.

    A checkpoint has a file of the same name, which names its weights.
    """
    try:
        found = json.loads((Path(folder) / MANIFEST_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError, RecursionError):  # who reads it says what is wrong with it
        return True
    return not (isinstance(found, dict) and "weight_hash" in found)
