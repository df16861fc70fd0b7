"""The present schemas' bytes, as they were committed: they change with an event's fields alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlstreams.schemas import EVENTS, DecodeError, Tensor, decode, encode
from rlstreams.schemas.shapes import fields_of, shape_of
from tests.factories import one_of_each
from tests.unit.schemas.test_avsc import WRITE

FOLDER = Path(__file__).parents[2] / "golden" / "schemas"
EXAMPLES = one_of_each()


def arrays_out(value: Any) -> Any:
    """The event with arrays for tensors: another zstd may compress to other bytes."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.codec, value.numpy().tolist()
    if isinstance(value, tuple):
        return [arrays_out(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: arrays_out(getattr(value, name)) for name, _ in fields_of(type(value))}
    return value


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_bytes_are_read(name):
    """The committed record gives the example, and is written again byte for byte."""
    wire = (FOLDER / f"{name}.bin").read_bytes()
    try:
        event = decode(wire)
    except DecodeError as err:
        pytest.fail(f"{name}: {err}; if its fields have changed: {WRITE}")
    assert arrays_out(EXAMPLES[name]) == arrays_out(event)
    assert wire == b"".join(encode(event)), f"{name}: {WRITE}"


def test_every_event_has_golden_bytes_with_every_optional_field():
    """No event escapes, and no field is left at None."""
    names = {cls.__name__ for cls in EVENTS}
    assert names == {path.stem for path in FOLDER.glob("*.bin")} == set(EXAMPLES)
    empty = [
        f"{name}.{field}"
        for name, event in EXAMPLES.items()
        for field, kind in fields_of(type(event))
        if shape_of(kind)[0] == "optional" and getattr(event, field) is None
    ]
    assert [] == empty
