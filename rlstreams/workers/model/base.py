"""What models, engines and scorers share; importing it costs nothing."""

from __future__ import annotations

CPU = "cpu"  # a device
LOGITS_BYTES = 256 << 20  # logits in float32 that are computed at a time, where many are needed

# What a library's forward, a kernel or a compiler raises that cannot do what it is asked.
REFUSALS = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError)


class EngineError(Exception):
    """An engine refused or failed; names server, request and field."""


class RankLostError(Exception):
    """A rank is gone, silent or failed; names it. Its process ends, and another start may help."""
