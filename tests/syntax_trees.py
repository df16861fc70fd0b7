"""Our modules as syntax trees, for the tests that hold rules against them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("rlstreams", "infra", "tests")  # a module's path is its import name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """One file of ours; its tree is walked once for all rules."""

    name: str  # dotted
    path: Path
    tree: ast.Module
    num_lines: int

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of its tree."""
        return tuple(ast.walk(self.tree))

    @functools.cached_property
    def imports(self) -> tuple[str, ...]:
        """Dotted names of everything imported, late imports included."""
        found: list[str] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found += (f"{node.module}.{alias.name}" for alias in node.names)
        return tuple(found)

    @functools.cached_property
    def asked(self) -> tuple[str, ...]:
        """Calls and class patterns, as text: one of them asks what an event is."""
        asking = ast.Call | ast.MatchClass
        return tuple(ast.unparse(node) for node in self.nodes if isinstance(node, asking))


class Modules(Sequence[Module]):
    """Modules of a tree, parsed when the first is asked for: all workers of pytest-xdist import
    this file, and one of them runs it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @functools.cached_property
    def _parsed(self) -> list[Module]:
        gc.disable()  # millions of objects that stay: to look for garbage among them is half of it
        try:
            return modules_of(self._root)
        finally:
            gc.freeze()
            gc.enable()

    def __getitem__(self, index):
        return self._parsed[index]

    def __len__(self) -> int:
        return len(self._parsed)


def modules_of(root: Path) -> list[Module]:
    modules = []
    for path in sorted(path for folder in OURS for path in (root / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        lines = len(text.splitlines())
        modules.append(Module(name=name, path=path, tree=ast.parse(text), num_lines=lines))
    return modules


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


MODULES = Modules(ROOT)
