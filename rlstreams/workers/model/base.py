"""Names that models, engines and scorers share; importing it costs nothing."""

from __future__ import annotations

CPU = "cpu"  # a device
VISIBLE = "CUDA_VISIBLE_DEVICES"
LOGITS_BYTES = 256 << 20  # float32 logits that are computed at once, where many are needed

# Exceptions of a library's forward, a kernel or a compiler that cannot do a call.
REFUSALS = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError)


class EngineError(Exception):
    """An engine refused or failed; names server, request and field."""


class RankLostError(Exception):
    """A rank has ended, is silent or failed; names it. Its process ends, and a restart may help."""
