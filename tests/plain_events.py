"""Events as nested dicts and lists, as other Avro libraries write them."""

from __future__ import annotations

import dataclasses
from typing import Any


def to_plain(value: Any) -> Any:
    """An event as nested dicts and lists, as fastavro writes them; views become bytes."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return bytes(value) if isinstance(value, memoryview | bytearray) else value
