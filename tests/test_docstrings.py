"""Docstrings name their thing: none opens with a word that stands in place of a noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.test_architecture import MODULES, Module, modules_of

RIDDLE = re.compile(r"(Who|Whose|What|Behind)\b")


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Strings that stand alone: of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
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
        for text in docstrings(module.tree)
        if RIDDLE.match(str(text.value).strip())
    ]


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
