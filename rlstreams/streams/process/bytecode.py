"""Bytecode of libraries: kept in the cache folder where it cannot be kept beside their source.

uv installs libraries without bytecode, and containers set PYTHONDONTWRITEBYTECODE or have libraries
in a folder that may not be written: every process then compiles all that it imports
(infra/decisions/0101). A library that has its bytecode beside it is left alone, for a Python that
is given a folder for bytecode looks nowhere else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from rlstreams.streams.log.cache import cache_folder, is_own

FORBIDS = "PYTHONDONTWRITEBYTECODE"
PLACE = "PYTHONPYCACHEPREFIX"
_OURS = "torch"  # the largest library of our processes; all of them are installed alike


def keep() -> None:
    """Keep the bytecode of this process, and of all that it starts with its own Python.

    Call it before the large libraries are imported.
    """
    spec = find_spec(_OURS)
    changes = variables("" if spec is None else spec.origin or "", os.environ)
    if changes:
        os.environ.update(changes)
        sys.dont_write_bytecode, sys.pycache_prefix = False, changes[PLACE] or None


def variables(library: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Changes of a Python's environment with which it keeps bytecode; none where it needs no help,
    or where the cache folder's `bytecode` cannot be made or others can write it.

    Args:
        library: `__init__.py` of a large library that it imports; empty: it has none.
        environment: the one that it would have.
    """
    source, ours = Path(library), str(cache_folder().absolute() / "bytecode")
    place = environment.get(PLACE, "")
    if not library or place not in ("", ours):
        return {}
    if any((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc")):
        return {PLACE: ""} if place else {}
    if place or not (environment.get(FORBIDS) or not os.access(source.parent, os.W_OK)):
        return {}
    return {FORBIDS: "", PLACE: ours} if is_own(Path(ours)) else {}  # bytecode is code
