"""What is said: the events of an RL post-training run, their Avro schemas and their bytes."""

from schemas.avro import compatibility_errors, fingerprint, parsing_form, schema_text
from schemas.binary import DecodeError, decode, encode
from schemas.events import *  # noqa: F403  (events.__all__ is the list)
from schemas.events import __all__ as _events

__all__ = [
    "DecodeError",
    "compatibility_errors",
    "decode",
    "encode",
    "fingerprint",
    "parsing_form",
    "schema_text",
    *_events,
]
