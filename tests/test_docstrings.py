"""Names: a docstring opens with its thing, and a class's name means one class."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.syntax_trees import MODULES, Module, is_within, modules_of

# Where a turn would be taken for a shift on a shared GPU, or for a tick of a role's loop: a turn is
# what one side of a conversation says.
WITHOUT_TURNS = (
    "rlstreams.up",
    "rlstreams.streams.leases",
    "rlstreams.workers.loop",
    "rlstreams.workers.server",
    "rlstreams.workers.engines.gpu_shifts",
    "rlstreams.workers.bootstrap.gpus",
    "rlstreams.workers.trainer.shifts",
    "rlstreams.workers.trainer.worker",
)
RIDDLE = re.compile(r"(Who|Whose|What|Behind)\b")


def docstrings(module: Module) -> Iterator[ast.Constant]:
    """Strings that stand alone: of modules, classes, functions and attributes."""
    for node in module.nodes:
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield node.value


def riddles(modules: Sequence[Module]) -> list[str]:
    """Module, line and text of product docstrings that open with such a word."""
    return [
        f"{module.name}:{text.lineno} {str(text.value).strip()[:60]}"
        for module in modules
        if module.name.split(".")[0] == "rlstreams"
        for text in docstrings(module)
        if RIDDLE.match(str(text.value).strip())
    ]


def turns(modules: Sequence[Module]) -> list[str]:
    """Module and line of definitions and strings there that say turn."""
    found = []
    for module in modules:
        if not any(is_within(module.name, room) for room in WITHOUT_TURNS):
            continue
        for node in module.nodes:
            said = ""
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                said = re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said = node.value
            if re.search(r"\bturns?\b", said, re.IGNORECASE):
                assert isinstance(node, ast.stmt | ast.expr)
                found.append(f"{module.name}:{node.lineno}")
    return found


def namesakes(modules: Sequence[Module]) -> dict[str, list[str]]:
    """Names of public product classes that several modules define, with these modules."""
    homes = collections.defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and module.name.split(".")[0] == "rlstreams":
                homes[node.name].append(module.name)
    return {
        name: found for name, found in homes.items() if len(found) > 1 and not name.startswith("_")
    }


def test_docstrings_name_their_thing() -> None:
    """As in `Records that one poll returned`, not `What one poll brought`."""
    assert riddles(MODULES) == []


def test_the_check_finds_riddles(tmp_path: Path) -> None:
    """It finds one of each kind, and lets "Whether" and later words be."""
    (tmp_path / "rlstreams").mkdir()
    (tmp_path / "rlstreams" / "bad.py").write_text(
        '"""What it is."""\n'
        "class A:\n"
        '    """Who asks."""\n'
        "    x: int = 0\n"
        '    """Behind it."""\n'
        "    def f(self) -> None:\n"
        '        """Whose it is.\n\n        More.\n        """\n'
        "    def g(self) -> bool:\n"
        '        """Whether it is; what follows is allowed."""\n',
        encoding="utf-8",
    )
    assert [found.split()[0] for found in riddles(modules_of(tmp_path))] == [
        "rlstreams.bad:1",
        "rlstreams.bad:3",
        "rlstreams.bad:5",
        "rlstreams.bad:7",
    ]


def test_a_turn_is_a_conversations() -> None:
    """A GPU is shared in shifts, a role's loop ticks."""
    assert turns(MODULES) == []


def test_the_check_finds_turns(tmp_path: Path) -> None:
    home = tmp_path / "rlstreams/workers/loop"
    home.mkdir(parents=True)
    text = (
        'class OwnTurns:\n    """It returns."""\n    def turn(self):\n        return "its turn"\n'
    )
    (home / "lease.py").write_text(text, encoding="utf-8")
    found = [1, 3, 4]
    assert turns(modules_of(tmp_path)) == [f"rlstreams.workers.loop.lease:{n}" for n in found]


def test_a_class_has_its_name_for_itself() -> None:
    """Two `Server`s, a host's and a client's view of it, are one search result and one guess."""
    assert namesakes(MODULES) == {}


def test_the_check_finds_namesakes(tmp_path: Path) -> None:
    """In two modules of the product; private classes may share a name."""
    for name in ("rlstreams/a.py", "rlstreams/b.py", "tests/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("class Keeper: ...\nclass _Call: ...\n", encoding="utf-8")
    assert namesakes(modules_of(tmp_path)) == {"Keeper": ["rlstreams.a", "rlstreams.b"]}
