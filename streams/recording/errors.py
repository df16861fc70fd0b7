"""Errors of a recording: each names the file, and what is there instead."""

from __future__ import annotations

from rlstreams.streams.log.errors import StreamsError


class RecordingError(StreamsError):
    """A recording that cannot be used as asked."""


class ForeignFileError(RecordingError):
    """A file or folder that is no part of this recording, or of another format."""


class DamagedError(RecordingError):
    """Bytes of a recording are missing or were changed."""


class NotRecordedError(RecordingError):
    """What was asked for is not in the recording; says what is there instead."""
