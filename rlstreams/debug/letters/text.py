"""Dead letters and other events as text: a table with totals, JSON, one dead letter whole."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlstreams.debug.letters.view import Letter, LettersView
from rlstreams.schemas import DecodeError, SchemaTexts, decode
from rlstreams.schemas.binary import NO_TEXTS
from rlstreams.schemas.events import DeadLetter, Tensor, TensorError
from rlstreams.streams.log.text import counted, plain_json, utc_text
from rlstreams.words.causes import Cause, causes
from rlstreams.words.screen import visible

SHOWN_VALUES = 12  # of an array
SHOWN_TEXT = 2000  # characters of a value
_RECORD = "value"  # field of a dead letter: the record that it is about
_COLUMNS = ("when (UTC)", "worker", "reason", "permanent", "sample", "group", "origin", "detail")


def table(view: LettersView, letters: Sequence[Letter], width: int = 0) -> str:
    """Return a line for each dead letter, totals by reason, and by cause where several share one.

    Args:
        width: characters that a line is cut to; 0: no line is cut.
    """
    if not letters:
        return totals(letters)
    rows = [_COLUMNS, *(_row(view, letter) for letter in letters)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS) - 1)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    repeated = [f"{c.num:>7}  {c.reason}: {visible(c.newest)}" for c in _repeated(letters)]
    lines = [line[:width].rstrip() if width else line.rstrip() for line in lines]
    by_cause = ["by cause, each with its newest detail:", *repeated] if repeated else []
    return "\n".join([*lines, totals(letters), *by_cause])


def _repeated(letters: Sequence[Letter]) -> list[Cause]:
    """Return the causes, if they are fewer than the dead letters."""
    found = causes(letter.event for letter in letters)
    return found if len(found) < len(letters) else []


def totals(letters: Sequence[Letter]) -> str:
    """Return one line: the number of dead letters, and the number by reason."""
    counts = Counter(letter.event.reason for letter in letters)
    by_reason = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
    return f"{counted(len(letters), 'dead letter')}: {by_reason}" if letters else "no dead letters"


def json_line(view: LettersView, letter: Letter) -> str:
    """Return all fields but the bytes, and the group's fate, as one JSON object."""
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
    """Return all fields of a dead letter, and the record that it is about.

    Args:
        schemas: the log's schemas, by which even a newer release's record is readable.
    """
    event = letter.event
    fields = plain_fields(event, schemas)
    record, state = fields.pop(_RECORD), view.group(event.group_id)
    more = {
        "when": f"{_when(event)} UTC",
        "group": f"{state}" + (f" ({state.dropped.detail})" if state.dropped else ""),
        f"record at {letter.origin}, {letter.num_bytes} bytes": record,
    }
    return visible("\n".join(_lines({**fields, **more})))


def plain_fields(event: Any, schemas: SchemaTexts) -> dict[str, Any]:  # noqa: ANN401
    """Return fields as JSON values; a dead letter's record is decoded too."""
    names = (field.name for field in dataclasses.fields(event))
    return {name: _plain(name, getattr(event, name), schemas) for name in names}


def event_row(value: bytes, schemas: SchemaTexts) -> dict[str, Any]:
    """Return a record's value; one that is no event of ours has a `problem`, not `fields`."""
    try:
        event = decode(value, schemas)
    except DecodeError as err:
        text = value.decode("utf-8", "backslashreplace")
        return {"event": None, "problem": str(err), "value": text}
    return {"event": type(event).__name__, "fields": plain_fields(event, schemas)}


def _plain(name: str, value: Any, schemas: SchemaTexts) -> Any:  # noqa: ANN401
    if isinstance(value, Tensor):
        try:
            return value.numpy().tolist()
        except TensorError as err:
            return f"{value.dtype} {list(value.shape)}: {err}"
    if dataclasses.is_dataclass(value):
        return plain_fields(value, schemas)
    if isinstance(value, tuple):
        return [_plain("", item, schemas) for item in value]
    if isinstance(value, bytes | memoryview):
        data = bytes(value)
        is_record = name == _RECORD
        return event_row(data, schemas) if is_record else data.decode("utf-8", "backslashreplace")
    return value


def _lines(fields: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in fields.items():
        nested = {name: value} if isinstance(value, dict) else {}
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            nested = {f"{name}[{number}]": item for number, item in enumerate(value)}
        for title, inner in nested.items():
            yield f"{indent}{title}:"
            yield from _lines(inner, indent + "  ")
        if not nested:
            yield f"{indent}{name}: {_short(value)}"


def _short(value: object) -> str:
    if isinstance(value, list):
        more = " ..." if len(value) > SHOWN_VALUES else ""
        return f"[{len(value)}] {' '.join(map(str, value[:SHOWN_VALUES]))}{more}"
    text = str(value)
    return f"{text[:SHOWN_TEXT]}..." if len(text) > SHOWN_TEXT else text or "(empty)"


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
