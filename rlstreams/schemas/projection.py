"""A few fields of a record, without its other fields: for readers that need no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlstreams.schemas.binary import NO_TEXTS, DecodeError, SchemaTexts, decode, header_of, read_own
from rlstreams.schemas.decoder import compile_projection
from rlstreams.schemas.events import Event
from rlstreams.schemas.tensor import Buffer


class Projection:
    """Reads the named fields of records of one event.

    `Projection(Trajectory, "group_id", "segments.policy_version")` gives `("7", [3, 3, 4])`: a
    dotted name leads into a record, and through an array of records to the list of that field's
    values. Where an optional record is absent, the value is None.

    Raises:
        ValueError: the event has no such field, or one is asked for whole and in part.
    """

    def __init__(self, event: type[Event], *fields: str) -> None:
        self.event = event
        self.fields = fields
        self._paths = [field.split(".") for field in fields]
        self._header = header_of(event)
        wanted: dict[str, Any] = {}
        variables = [_want(wanted, path, f"field_{n}") for n, path in enumerate(self._paths)]
        self._read = compile_projection(event, wanted, variables)

    def read(self, value: Buffer, schemas: SchemaTexts = NO_TEXTS) -> tuple[Any, ...]:
        """The values of the fields, in their order. Equal to those of `decode(value)`.

        A record of the event's present schema is stepped through to its end, so damage is noticed
        unless it lies within a text, bytes or number that is not wanted. One of another schema is
        decoded.

        Raises:
            DecodeError: as `decode`, or a record of another event.
        """
        if value[: len(self._header)] == self._header:
            found: tuple[Any, ...] = read_own(self._read, self.event, value)
            return found
        event = decode(value, schemas)
        if type(event) is not self.event:
            raise DecodeError(f"a {type(event).__name__}, not a {self.event.__name__}")
        return tuple(_value(event, path) for path in self._paths)


def _want(wanted: dict[str, Any], path: Sequence[str], variable: str) -> str:
    """Add a field to `wanted`; return the variable that it is read to."""
    node: Any = wanted
    for name in path[:-1]:
        node = node.setdefault(name, {}) if isinstance(node, dict) else None
    found = node.setdefault(path[-1], variable) if isinstance(node, dict) else None
    if not isinstance(found, str):
        raise ValueError(f"{'.'.join(path)}: asked for whole and in part")  # noqa: TRY004
    return found


def _value(node: Any, path: Sequence[str]) -> Any:  # noqa: ANN401 - a field may be anything
    for depth, name in enumerate(path):
        if node is None:
            return None
        if isinstance(node, tuple):
            return [_value(item, path[depth:]) for item in node]
        node = getattr(node, name)
    return node
