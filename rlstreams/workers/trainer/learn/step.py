"""Result and error of a step; importing it costs nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


class NumericsError(Exception):
    """A step gave NaN or infinity; names step and number. The weights are as before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Loss and metrics of a step, for the ledger."""

    loss: float  # mean over the batch's loss tokens
    metrics: dict[str, float]
    seconds: dict[str, float] = field(compare=False)  # by part


def problem_of(loss: float, grad_norm: float) -> str:
    """Problem with the numbers of a step; "": none."""
    named = (("loss", loss), ("gradient norm", grad_norm))
    return next((f"{name} is {value}" for name, value in named if not math.isfinite(value)), "")
