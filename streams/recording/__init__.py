"""Recordings: topics as Avro container files, found again by an index. Format: README.md here."""

from rlstreams.streams.recording.errors import (
    DamagedError,
    ForeignFileError,
    NotRecordedError,
    RecordingError,
)
from rlstreams.streams.recording.index import Entry, Index
from rlstreams.streams.recording.manifest import Manifest, RecordedTopic
from rlstreams.streams.recording.reader import Recording
from rlstreams.streams.recording.writer import RecordingWriter

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
