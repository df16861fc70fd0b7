"""The rooms of the top floor: a tool may use those below it, and is used by those above."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.syntax_trees import MODULES, Module, is_within, modules_of

# The top floor, from above: a room may import those that stand behind it, never one before it.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "__main__": ("cli",),
    "cli": ("up", "check", "debug", "show", "words"),
    "up": ("check", "debug", "show", "words"),
    "check": ("show", "words"),
    "debug": ("show", "words"),
    "show": ("words",),
    "words": (),
}


def arrows_up(modules: Sequence[Module]) -> list[str]:
    """Imports of the top floor that lead to a room above, or beside; late ones count."""
    homes = [(m, m.name.split(".")[1]) for m in modules if m.name.startswith("rlstreams.")]
    return [
        f"{module.name} imports {name}"
        for module, room in homes
        if room in ROOMS
        for name in module.imports
        for other in ROOMS
        if other != room and is_within(name, f"rlstreams.{other}") and other not in ROOMS[room]
    ]


def test_no_arrow_leads_up_on_the_top_floor() -> None:
    """cli -> up -> check | debug -> show -> words; every tool has its room."""
    assert arrows_up(MODULES) == []
    folders = {m.name.split(".")[1] for m in MODULES if m.name.startswith("rlstreams.")}
    assert folders == {*ROOMS, "schemas", "streams", "workers"}


def test_the_check_finds_arrows_that_lead_up(tmp_path: Path) -> None:
    """Late ones, and those to a room beside; not those that lead down."""
    bad = {
        "up/d.py": "def late():\n    from rlstreams.__main__ import main\n",
        "check/e.py": "from rlstreams.debug import x\nfrom rlstreams.words import y\n",
        "show/b.py": "import rlstreams.up.c\n",
    }
    for name, text in bad.items():
        path = tmp_path / "rlstreams" / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    assert arrows_up(modules_of(tmp_path)) == [
        "rlstreams.check.e imports rlstreams.debug.x",
        "rlstreams.show.b imports rlstreams.up.c",
        "rlstreams.up.d imports rlstreams.__main__.main",
    ]
