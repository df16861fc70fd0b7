"""Numbers and times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime


def counted(number: int, one: str, many: str = "") -> str:
    """Args: number: how many; one: of what; many: more than one of it (`one` with an s)."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def utc_text(at_ms: int, between: str = " ") -> str:
    """`2026-11-18 11:06:40`, in UTC; outside of years 1 to 9999 the milliseconds since 1970."""
    try:
        when = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms"
    return f"{when:%Y-%m-%d}{between}{when:%H:%M:%S}"
