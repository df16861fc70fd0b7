"""Source text of a Python function that is being generated."""

from __future__ import annotations

from typing import Any


class Source:
    """Collects lines, hands out fresh names and holds what the lines refer to."""

    def __init__(self, **scope: object) -> None:
        self.scope: dict[str, Any] = dict(scope)
        self._lines: list[str] = []
        self._names = 0

    def add(self, depth: int, *lines: str) -> None:
        """Append lines at an indentation depth."""
        self._lines += ["    " * depth + line for line in lines]

    def name(self) -> str:
        """A name that nothing else has."""
        self._names += 1
        return f"v{self._names}"

    def function(self, name: str, title: str) -> Any:  # noqa: ANN401
        """Compile; `title` is what a traceback shows as the file."""
        exec(compile("\n".join(self._lines), f"<{title}>", "exec"), self.scope)
        return self.scope[name]
