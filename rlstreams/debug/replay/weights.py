"""Recorded weight versions gathered in one folder, as the channel `file` serves them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlstreams.debug.replay.player import outgoing_of
from rlstreams.schemas import encode
from rlstreams.schemas.events import Endpoint, PolicyPublished
from rlstreams.streams.log.record import Outgoing, Record
from rlstreams.streams.recording import Recording
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.weights.file import CHANNEL, file_name

CHECKPOINT_WEIGHTS = "model.safetensors"


class RecordedWeights:
    """The versions of a recorded run whose weights are available.

    Args:
        recording: whose `PolicyPublished` name versions and hashes.
        config: of the recorded run, whose own folders are looked at last.
        folders: weight versions or checkpoints; the recording's own are looked at first.
        target: an empty folder, filled with links or copies.
    """

    def __init__(
        self, recording: Recording, config: RunConfig, folders: Sequence[Path], target: Path
    ) -> None:
        self._target = target
        self._published: dict[int, Record[PolicyPublished]] = {}
        for record in recording.events(PolicyPublished):
            self._published[record.event.policy_version] = record
        self._run = recording.manifest.run
        places = [recording.folder / "weights", *folders, Path(config.folder) / "weights"]
        places += [recording.folder / "checkpoints", Path(config.folder) / "checkpoints"]
        target.mkdir(parents=True, exist_ok=True)
        found = {path.name: path for place in reversed(places) for path in _versions(place)}
        found |= {name: path for place in reversed(places) for name, path in _checkpoints(place)}
        self.available: set[int] = set()
        for version, record in self._published.items():
            name = file_name(version, record.event.weight_hash)
            if name in found:
                _link(found[name], target / name)
                self.available.add(version)

    @property
    def known(self) -> set[int]:
        """Versions that the recording announces."""
        return set(self._published)

    def announcement(self, version: int, served: set[int]) -> Outgoing:
        """`PolicyPublished` of a version, with its file in our folder as the only endpoint."""
        record = self._published[version]
        event = replace(
            record.event,
            endpoints=(Endpoint(channel=CHANNEL, address=str(self._target.resolve())),),
            versions_served=tuple(sorted(served)),
        )
        return outgoing_of(record.raw, self._run, encode(event))


def _versions(folder: Path) -> list[Path]:
    return sorted(folder.glob("v*-*.safetensors")) if folder.is_dir() else []


def _checkpoints(folder: Path) -> list[tuple[str, Path]]:
    """Weights in checkpoints, under the name that the channel would give them."""
    found = []
    for manifest in sorted(folder.glob("*/manifest.json")) if folder.is_dir() else []:
        try:
            said = json.loads(manifest.read_text(encoding="utf-8"))
            name = file_name(int(said["policy_version"]), str(said["weight_hash"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not one of ours; what is missing is told by version
        path = manifest.parent / CHECKPOINT_WEIGHTS
        if path.is_file():
            found.append((name, path))
    return found


def _link(source: Path, target: Path) -> None:
    if target.exists():
        return
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
