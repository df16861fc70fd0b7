"""The rooms of the top floor, and the room of what depends on a kind of model server."""

from __future__ import annotations

import ast
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
# A kind of model server is named where its adapter is; all others ask the adapter.
ADAPTERS = tuple(f"rlstreams.workers.engines.served.{kind}" for kind in ("vllm", "sglang"))


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


def named_kinds(modules: Sequence[Module]) -> list[str]:
    """Modules and lines that name one kind of model server, and are no adapter of it."""
    return [
        f"{module.name}:{node.lineno} {ast.unparse(node)}"
        for module in modules
        if is_within(module.name, "rlstreams") and module.name not in ADAPTERS
        for node in module.nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("Kind.VLLM", "Kind.SGLANG")
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


def test_what_depends_on_a_kind_of_server_is_its_adapters() -> None:
    assert named_kinds(MODULES) == []


def test_the_check_finds_a_kind_that_is_named_elsewhere(tmp_path: Path) -> None:
    home = tmp_path / "rlstreams/workers/engines/served"
    home.mkdir(parents=True)
    for name in ("vllm", "check"):
        text = "flag = '--a' if facts.kind is Kind.VLLM else '--b'\n"
        (home / f"{name}.py").write_text(text, encoding="utf-8")
    assert named_kinds(modules_of(tmp_path)) == [
        "rlstreams.workers.engines.served.check:1 Kind.VLLM"
    ]
