"""Values of free tables: what somebody else's function, template or task is called with."""

from __future__ import annotations

from typing import Any, TypeAlias

# Any: what lies inside arrays and tables is for its receiver to judge.
Option: TypeAlias = str | int | float | bool | list[Any] | dict[str, Any]
