"""Recordings: topics as Avro container files, found again by an index. Format: README.md here."""

from streams.recording.errors import (
    DamagedError,
    ForeignFileError,
    NotRecordedError,
    RecordingError,
)
from streams.recording.index import Entry, Index
from streams.recording.manifest import Manifest, RecordedTopic
from streams.recording.reader import Recording
from streams.recording.writer import RecordingWriter

__all__ = [
    "DamagedError",
    "Entry",
    "ForeignFileError",
    "Index",
    "Manifest",
    "NotRecordedError",
    "RecordedTopic",
    "Recording",
    "RecordingError",
    "RecordingWriter",
]
