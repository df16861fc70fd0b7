"""Write what follows from the events' dataclasses: schemas, their history, golden bytes.

    python -m tests.unit.schemas.write

Words of a schema stay; add those of a new field by hand. A file of the history is never changed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rlstreams.schemas import EVENTS, encode
from rlstreams.schemas.avro import HISTORY, fingerprint, schema_file
from tests.unit.schemas.test_avsc import avro_of
from tests.unit.schemas.test_golden import EXAMPLES, FOLDER

_ORDER = ("type", "name", "namespace", "doc", "fields")
_FIELD_ORDER = ("name", "type", "doc", "default")


def with_words(made: Any, old: Any, order: tuple[str, ...] = _ORDER) -> Any:
    """An Avro type with the docs that an older text has in the same places."""
    if isinstance(made, list) and isinstance(old, list):
        return [with_words(*pair) for pair in zip(made, old, strict=False)]
    if not isinstance(made, dict) or not isinstance(old, dict):
        return made
    found = {key: old[key] for key in ("doc", "namespace") if key in old} | made
    for key in ("type", "items", "values"):
        if key in found and key in old:
            found[key] = with_words(found[key], old[key])
    if "fields" in found:
        before = {field["name"]: field for field in old.get("fields", ())}
        found["fields"] = [
            with_words(field, before.get(field["name"], {}), _FIELD_ORDER)
            for field in found["fields"]
        ]
    places = [*(key for key in old if old.keys() == found.keys()), *order, *found]
    return dict(sorted(found.items(), key=lambda pair: places.index(pair[0])))


def text_of(cls: type) -> str:
    """Text of an event's schema."""
    file = schema_file(cls.__name__)
    old = json.loads(file.read_text("utf-8")) if file.exists() else {"namespace": "rlstreams"}
    return json.dumps(with_words(avro_of(cls, set()), old), indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write what differs."""
    for cls in EVENTS:
        file, text = schema_file(cls.__name__), text_of(cls)
        kept = HISTORY / f"{file.stem}.{fingerprint(text).hex()}.avsc"
        for path in (file, *([] if kept.exists() else [kept])):
            if not path.exists() or path.read_text("utf-8") != text:
                path.write_text(text, "utf-8")
                sys.stdout.write(f"written: {path}\n")
        golden = FOLDER / f"{cls.__name__}.bin"
        wire = b"".join(encode(EXAMPLES[cls.__name__]))
        if not golden.exists() or golden.read_bytes() != wire:
            golden.write_bytes(wire)
            sys.stdout.write(f"written: {golden}\n")


if __name__ == "__main__":
    main()
