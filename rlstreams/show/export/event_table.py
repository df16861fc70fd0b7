"""One kind of event as an Arrow table: its fields as they are, and where each record lies.

Tensors become lists, maps become lists of (name, value), so that every reader knows the types.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from rlstreams.schemas.avro import schema_text
from rlstreams.schemas.events import EVENTS, Event, Tensor
from rlstreams.schemas.shapes import fields_of, shape_of
from rlstreams.streams.log.record import Record
from rlstreams.streams.run.run_log import RunLog

_SCALARS = {
    "string": pa.string(),
    "long": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "bytes": pa.binary(),
}
# The wire names a tensor's type in each record; a table has one for each field.
TENSORS: Mapping[str, pa.DataType] = {
    "token_ids": pa.list_(pa.int32()),
    "behavior_logprobs": pa.list_(pa.float32()),
    "proximal_logprobs": pa.list_(pa.float32()),
    "reference_logprobs": pa.list_(pa.float32()),
    "entropy": pa.list_(pa.float32()),
    "routed_experts": pa.list_(pa.list_(pa.list_(pa.uint16()))),
    "routed_experts_mask": pa.list_(pa.uint8()),
}
_ENVELOPE = (
    pa.field("log_partition", pa.int64(), metadata={"doc": "of the record in its topic"}),
    pa.field("log_offset", pa.int64(), metadata={"doc": "of the record in its partition"}),
    pa.field("log_time", pa.timestamp("ms", "UTC"), metadata={"doc": "as the broker has it"}),
)


def table_name(kind: type[Event]) -> str:
    """`step_completed` for `StepCompleted`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


EVENT_TABLES: Mapping[str, type[Event]] = {table_name(kind): kind for kind in EVENTS}


def event_schema(kind: type[Event]) -> pa.Schema:
    """Columns of the table of one kind of event."""
    told = json.loads(schema_text(kind.__name__))
    docs = {field["name"]: field.get("doc", "") for field in told["fields"]}
    columns = [field.with_metadata({"doc": docs[field.name]}) for field in _fields(kind)]
    return pa.schema([*_ENVELOPE, *columns], metadata={"doc": told["doc"]})


def event_rows(log: RunLog, kind: type[Event]) -> Iterator[dict[str, Any]]:
    """Every event of the kind, copies included; what cannot be read is counted by the log."""
    for record in log.read(kind, with_copies=True, skip_unreadable=True):
        yield event_row(record)


def event_row(record: Record[Event]) -> dict[str, Any]:
    """One record as a row."""
    return {
        "log_partition": record.position.partition,
        "log_offset": record.position.offset,
        "log_time": record.raw.timestamp_ms,
        **_plain(record.event),
    }


def _fields(cls: type) -> list[pa.Field]:
    return [pa.field(name, _type(name, kind)) for name, kind in fields_of(cls)]


def _type(name: str, kind: Any) -> pa.DataType:  # noqa: ANN401  (annotations have no common type)
    shape, inner = shape_of(kind)
    if shape == "optional":
        return _type(name, inner)
    if shape == "record":
        return TENSORS[name] if inner is Tensor else pa.struct(_fields(inner))
    if shape == "array":
        return pa.list_(_type(name, inner))
    if shape == "map":
        value = _type(name, inner)
        return pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", value)]))
    return _SCALARS[shape]


def _plain(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Tensor):
        array = value.numpy()
        return array if array.ndim == 1 else array.tolist()
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return named(value)
    return bytes(value) if isinstance(value, memoryview | bytearray) else value


def named(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A map as a list of name and value."""
    return [{"name": name, "value": value} for name, value in values.items()]
