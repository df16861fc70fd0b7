"""Recordings: a run's topics as Parquet files and a manifest. Format: README.md here."""

from rlstreams.streams.recording.manifest import (
    DamagedError,
    ForeignFileError,
    Manifest,
    NotRecordedError,
    RecordedTopic,
    RecordingError,
)
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
