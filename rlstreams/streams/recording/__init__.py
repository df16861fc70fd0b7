"""Recordings: a run's topics as Parquet files and a manifest. Format: README.md here.

Reader and writer are imported on first use: pyarrow takes a third of a second, and the check
whether a folder is a recording needs none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from rlstreams.streams.recording.manifest import (
    DamagedError,
    ForeignFileError,
    NotRecordedError,
    RecordedTopic,
    RecordingError,
    RecordingManifest,
)

if TYPE_CHECKING:
    from rlstreams.streams.recording.reader import Recording
    from rlstreams.streams.recording.writer import RecordingWriter

__all__ = [
    "DamagedError",
    "ForeignFileError",
    "NotRecordedError",
    "RecordedTopic",
    "Recording",
    "RecordingError",
    "RecordingManifest",
    "RecordingWriter",
]
_LATE = {"Recording": "reader", "RecordingWriter": "writer"}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
