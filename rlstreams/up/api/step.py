"""What a run says while it goes on: a step, an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The held-out rows, as they were answered by one version of the weights."""

    step: int
    """That made the version; 0: the model that the run began with."""
    policy_version: int
    accuracy: float
    """Mean reward of the answers."""
    best: float
    """Mean over the rows of the best answer to each."""
    samples: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Of a line that `up --json` printed."""
        return cls(
            step=row["step"],
            policy_version=row["policy_version"],
            accuracy=row["evaluation/mean_reward"],
            best=row["evaluation/best_reward"],
            samples=row["evaluation/samples"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A completed optimizer step."""

    step: int
    step_target: int
    """Where the run ends."""
    at: datetime
    policy_version: int
    """That it made."""
    epoch: int
    """Which start of the trainer made it, from 1."""
    reward: float
    """Mean over the batch."""
    loss: float
    samples: int
    tokens: int
    """Of the batch, prompts included."""
    masked_segments: int
    staleness_mean: float
    """Versions between the weights that sampled a token and those that were trained; by tokens."""
    staleness_max: int
    seconds: float
    tokens_per_s: float
    """Answer tokens of trained samples, mean over the last ten steps."""
    evaluation: Evaluation | None
    """The newest one that is over."""
    metrics: Mapping[str, float]
    """All else that the trainer measured: `entropy`, `grad_norm`, `kl`, `clip_fraction`, ..."""

    @classmethod
    def of(cls, row: Mapping[str, Any], evaluation: Evaluation | None) -> Self:
        """Of a line that `up --json` printed."""
        own = {field.name for field in fields(cls)} - {"at", "evaluation", "metrics"}
        rest = {name: value for name, value in row.items() if name not in {*own, "at", "kind"}}
        return cls(
            **{name: row[name] for name in own},
            at=datetime.fromisoformat(row["at"]),
            evaluation=evaluation,
            metrics=rest,
        )

    @property
    def held_out(self) -> float | None:
        """Accuracy of `evaluation`; None before the first."""
        return None if self.evaluation is None else self.evaluation.accuracy

    def __str__(self) -> str:
        """As `up` prints it."""
        held_out = "-" if self.held_out is None else f"{self.held_out:.3f}"
        return (
            f"step {self.step:>4}/{self.step_target}  reward {self.reward:.3f}  "
            f"held-out {held_out}  {self.tokens_per_s:,.0f} tokens/s  "
            f"staleness {self.staleness_mean:.2f}"
        )
