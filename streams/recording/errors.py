"""What goes wrong with a recording, all of it the user's to know: names file and place."""

from __future__ import annotations

from rlstreams.streams.log.errors import StreamsError


class RecordingError(StreamsError):
    """A recording that cannot be used as asked."""


class ForeignFileError(RecordingError):
    """A file that is no part of a recording: not Avro, another codec, another schema."""


class DamagedError(RecordingError):
    """Bytes are missing or were changed; `at` is the byte at which the damaged block begins."""

    def __init__(self, message: str, at: int = -1) -> None:
        super().__init__(message)
        self.at = at


class NotRecordedError(RecordingError):
    """What was asked for is not in the recording; says what is there instead."""
