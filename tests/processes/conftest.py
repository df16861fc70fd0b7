"""Small processes of our own; what they wait for otherwise comes at once."""

from __future__ import annotations

from tests.brief import brief_polls, no_power_cuts

__all__ = ["brief_polls", "no_power_cuts"]
