"""Packages that take seconds to import: imported by the first test that uses them, not by each
process that only reads the tests."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Late:
    """In the place of a module. What pytest asks all names of a file for is no use."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(import_module(self._module), name)
