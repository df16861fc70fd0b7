"""Recordings: a run's topics as Parquet files and a manifest. Format: README.md here."""

from rlstreams.streams.recording.errors import (
    DamagedError,
    ForeignFileError,
    NotRecordedError,
    RecordingError,
)
from rlstreams.streams.recording.manifest import Manifest, RecordedTopic
from rlstreams.streams.recording.reader import Recording
from rlstreams.streams.recording.writer import RecordingWriter

__all__ = [
    "DamagedError",
    "ForeignFileError",
    "Manifest",
    "NotRecordedError",
    "RecordedTopic",
    "Recording",
    "RecordingError",
    "RecordingWriter",
]
