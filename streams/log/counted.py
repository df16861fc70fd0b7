"""A count with its noun, as in `1 record` and `2,000 records`."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """Args: number: how many; one: of what; many: more than one of it (`one` with an s)."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
