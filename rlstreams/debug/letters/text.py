"""Dead letters as text: a table with totals, JSON lines, and one letter with all that is in it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from rlstreams.schemas import DecodeError, SchemaTexts, decode
from rlstreams.schemas.binary import NO_TEXTS
from rlstreams.schemas.events import DeadLetter, Tensor, TensorError
from rlstreams.streams.log.text import counted, plain_json, utc_text
from rlstreams.streams.views.letters import Letter, LettersView
from rlstreams.up.live.words import visible

DUMP_BYTES = 256
SHOWN_VALUES = 12  # of an array
_COLUMNS = ("when (UTC)", "worker", "reason", "permanent", "sample", "group", "origin", "detail")


def table(view: LettersView, letters: Sequence[Letter], width: int = 0) -> str:
    """A line for each letter and the totals by reason; cut to `width` characters, 0: as long as
    they are.
    """
    rows = [_COLUMNS, *(_row(view, letter) for letter in letters)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS) - 1)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    lines = [line[:width].rstrip() if width else line.rstrip() for line in lines]
    return "\n".join([*lines, totals(letters)])


def totals(letters: Sequence[Letter]) -> str:
    """One line: how many, and how many of each reason."""
    counts = Counter(letter.event.reason for letter in letters)
    told = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
    return f"{counted(len(letters), 'dead letter')}: {told}" if letters else "no dead letters"


def json_line(view: LettersView, letter: Letter) -> str:
    """All fields but the bytes, and what became of the group, as one JSON object."""
    fields = dataclasses.asdict(letter.event)
    del fields["key"], fields["value"]
    state = view.group(letter.event.group_id)
    more = {
        "num_bytes": letter.num_bytes,
        "origin": letter.origin,
        "group": str(state.fate),
        "replaced_by": state.replaced_by or None,
    }
    return plain_json(fields | more)


def whole(view: LettersView, letter: Letter, schemas: SchemaTexts = NO_TEXTS) -> str:
    """All fields of a letter, and the record that it is about.

    Args:
        schemas: of the log that holds them: a newer release's record has become readable since.
    """
    event = letter.event
    lines = [
        f"{field.name}: {_short(getattr(event, field.name))}"
        for field in dataclasses.fields(event)
        if field.name != "value"
    ]
    state = view.group(event.group_id)
    lines.append(f"when: {_when(event)} UTC")
    lines.append(f"group: {state}" + (f" ({state.dropped.detail})" if state.dropped else ""))
    lines.append(f"record at {letter.origin}, {letter.num_bytes} bytes:")
    return visible("\n".join([*lines, *(f"  {line}" for line in _origin(event, schemas))]))


def hex_dump(data: bytes) -> Iterator[str]:
    """Offset, sixteen bytes in hexadecimal, the same as ASCII."""
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        seen = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"{at:06x}  {row.hex(' '):<47}  {seen}"


def _row(view: LettersView, letter: Letter) -> tuple[str, ...]:
    event = letter.event
    cells = (
        _when(event),
        event.worker,
        event.reason,
        "yes" if event.permanent else "no",
        letter.sample,
        str(view.group(event.group_id)),
        letter.origin,
        " ".join(event.detail.split()),
    )
    return tuple(map(visible, cells))


def _when(event: DeadLetter) -> str:
    return utc_text(event.at_ms)


def _origin(event: DeadLetter, schemas: SchemaTexts) -> Iterator[str]:
    try:
        decoded = decode(event.value, schemas)
    except DecodeError as err:
        yield f"no event: {err}"
        yield from hex_dump(event.value[:DUMP_BYTES])
        if len(event.value) > DUMP_BYTES:
            yield f"... and {len(event.value) - DUMP_BYTES} bytes more"
        return
    yield type(decoded).__name__
    yield from _fields(decoded, "  ")


def _fields(value: object, indent: str) -> Iterator[str]:
    assert dataclasses.is_dataclass(value)
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        inners = inner if isinstance(inner, tuple) else (inner,)
        if inners and all(_is_record(item) for item in inners):
            for index, item in enumerate(inners):
                name = f"{field.name}[{index}]" if isinstance(inner, tuple) else field.name
                yield f"{indent}{name}:"
                yield from _fields(item, indent + "  ")
        else:
            yield f"{indent}{field.name}: {_short(inner)}"


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, Tensor)


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, bytes):
        return repr(value[:SHOWN_VALUES]) + ("..." if len(value) > SHOWN_VALUES else "")
    return str(value) if value != "" else "(empty)"


def _tensor(tensor: Tensor) -> str:
    head = f"{tensor.dtype} {list(tensor.shape)}"
    try:
        values = tensor.numpy().reshape(-1)
    except TensorError as err:
        return f"{head}: {err}"
    shown = " ".join(str(value) for value in values[:SHOWN_VALUES])
    return f"{head}: {shown}" + (" ..." if values.size > SHOWN_VALUES else "")
