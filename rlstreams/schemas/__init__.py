"""Events of an RL post-training run, their Avro schemas and their bytes."""

if __name__ != "rlstreams.schemas":  # a module under two names would have two of every class
    raise ImportError(f"import rlstreams.schemas, not {__name__}")

from rlstreams.schemas import events
from rlstreams.schemas.avro import fingerprint, schema_text
from rlstreams.schemas.binary import (
    DecodeError,
    SchemaTexts,
    UnknownEventError,
    UnknownSchemaError,
    decode,
    encode,
)
from rlstreams.schemas.events import *  # noqa: F403 - each is named there
from rlstreams.schemas.projection import Projection

__all__ = [
    "DecodeError",
    "Projection",
    "SchemaTexts",
    "UnknownEventError",
    "UnknownSchemaError",
    "decode",
    "encode",
    "fingerprint",
    "schema_text",
]
__all__ += events.__all__
