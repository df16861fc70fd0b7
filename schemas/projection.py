"""A few fields of a record, without the rest of it: for readers that need no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlstreams.schemas.binary import NO_TEXTS, SchemaTexts, decode
from rlstreams.schemas.events import Event
from rlstreams.schemas.tensor import Buffer


class Projection:
    """Reads the named fields of records of one event.

    `Projection(Trajectory, "group_id", "segments.policy_version")` gives `(7, [3, 3, 4])`: a dotted
    name leads into a record, and through an array of records to the list of that field's values.

    Raises:
        ValueError: the event has no such field.
    """

    def __init__(self, event: type[Event], *fields: str) -> None:
        self.event = event
        self.fields = fields
        self._paths = [field.split(".") for field in fields]

    def read(self, value: Buffer, schemas: SchemaTexts = NO_TEXTS) -> tuple[Any, ...]:
        """The values of the fields, in their order. Equal to those of `decode(value)`.

        Raises:
            DecodeError: as `decode`, or a record of another event.
        """
        event = decode(value, schemas)
        return tuple(_value(event, path) for path in self._paths)


def _value(node: Any, path: Sequence[str]) -> Any:  # noqa: ANN401 - a field may be anything
    for depth, name in enumerate(path):
        if isinstance(node, tuple):
            return [_value(item, path[depth:]) for item in node]
        node = getattr(node, name)
    return node
