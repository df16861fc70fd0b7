"""A step's metrics, from sums that do not depend on the cut of its batch.

Axes: `N` tokens of the loss. Log-probs are in nats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rlstreams.workers.model.token_scores import TokenScores
from rlstreams.workers.trainer.learn.correction import clamped
from rlstreams.workers.trainer.learn.loss import TokenLosses

MAXIMA = ("ratio_max",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTotals:
    """Sums over tokens, so that micro-batches add up to the batch's own means."""

    tokens: int = 0
    loss: float = 0.0
    shares: float = 0.0  # of the batch's loss, reduced
    entropy: float = 0.0
    clipped: float = 0.0
    weight: float = 0.0
    ratio_max: float = 0.0
    applied: float = 0.0
    applied_squares: float = 0.0
    kl: float = 0.0
    compared: int = 0  # tokens with a reference
    kl_reference: float = 0.0
    replayable: int = 0  # (token, layer) rows that pass the model with replayed routes
    replayed: int = 0  # rows among these that were recorded
    flips: int = 0  # rows among these for which the live router would have chosen otherwise
    rejected: float = 0.0  # tokens whose importance weight is 0
    valued: int = 0  # tokens with a value
    value_loss: float = 0.0
    value_clipped: float = 0.0

    def means(self) -> dict[str, float]:
        """The batch's metrics.

        `kl`: KL(behavior || policy) by Schulman's k3, mean of r - 1 - log r
        with r = policy / behavior. `ratio_max`: the largest policy / proximal. `ess`: effective
        sample size of the weights w rho that tokens are learnt with, (sum)^2 / (sum of squares),
        as a share of the tokens; 1 where all weigh alike. `rejected_fraction`: tokens of weight 0;
        absent if there is none. `kl_reference`: mean of the loss's KL terms, before `kl_coef`;
        absent without a reference. `value_loss` (before `value_coef`) and
        `value_clip_fraction`: of a critic. `routing_flips`: share of the recorded
        (token, layer) rows for which the live router would have chosen another set of experts;
        `routing_recorded`: share of the rows that are recorded. Both absent without replay.
        """
        num = max(self.tokens, 1)
        means = {
            "entropy": self.entropy / num,
            "clip_fraction": self.clipped / num,
            "weight_mean": self.weight / num,
            "ratio_max": self.ratio_max,
            "kl": self.kl / num,
        }
        if self.applied_squares:
            means["ess"] = self.applied**2 / (num * self.applied_squares)
        if self.rejected:
            means["rejected_fraction"] = self.rejected / num
        if self.compared:
            means["kl_reference"] = self.kl_reference / self.compared
        if self.valued:
            means["value_loss"] = self.value_loss / self.valued
            means["value_clip_fraction"] = self.value_clipped / self.valued
        if self.replayable:
            means["routing_recorded"] = self.replayed / self.replayable
        if self.replayed:
            means["routing_flips"] = self.flips / self.replayed
        return means


class LossSums:
    """The growing sums, on their device: read once, because a read waits for the GPU."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()  # known on the host
        self._found: list[tuple[tuple[str, ...], Tensor]] = []

    def add(self, losses: TokenLosses, scores: TokenScores, behavior_N: Tensor) -> None:
        """Count one micro-batch's tokens; sums are taken in float64."""
        if not len(losses.losses_N):
            return
        drift_N = clamped(scores.logprobs_N.detach() - behavior_N)
        applied_N = losses.weights_N.double() * losses.ratios_N.double()
        self._counts["tokens"] += len(losses.losses_N)
        self._sum(
            loss=losses.losses_N,
            entropy=scores.entropy_N,
            clipped=losses.is_clipped_N,
            weight=losses.weights_N,
            kl=torch.expm1(drift_N) - drift_N,
            applied=applied_N,
            applied_squares=applied_N.square(),
            rejected=losses.weights_N == 0,
        )
        maxima = losses.ratios_N.max().double()[None]
        self._found.append((MAXIMA, maxima.detach()))

    def add_share(self, share: Tensor) -> None:
        """Count one micro-batch's share of the batch's loss."""
        self._sum(shares=share)

    def add_reference(self, kl_N: Tensor) -> None:
        """Count divergences from a reference."""
        self._counts["compared"] += len(kl_N)
        self._sum(kl_reference=kl_N)

    def add_values(self, losses_N: Tensor, is_clipped_N: Tensor) -> None:
        """Count losses of values, and those that were clipped."""
        self._counts["valued"] += len(losses_N)
        self._sum(value_loss=losses_N, value_clipped=is_clipped_N)

    def add_routes(self, *, num_layers: int, recorded: int, forwarded: int, flips: int) -> None:
        """Count one micro-batch's routes; `recorded` and `forwarded` are tokens."""
        self._counts["replayable"] += num_layers * forwarded
        self._counts["replayed"] += num_layers * recorded
        self._counts["flips"] += flips

    def totals(self) -> LossTotals:
        """Totals of all counts so far, summed in the order of the calls."""
        found: dict[str, Any] = {}
        values = torch.cat([t for _, t in self._found]).tolist() if self._found else []
        names = [name for own, _ in self._found for name in own]
        for name, value in zip(names, values, strict=True):
            before = found.get(name, 0.0)
            found[name] = max(before, value) if name in MAXIMA else before + value
        return LossTotals(**self._counts, **found)

    def _sum(self, **values: Tensor) -> None:
        sums = [tensor.detach().sum(dtype=torch.float64) for tensor in values.values()]
        self._found.append((tuple(values), torch.stack(sums)))


def added(by_rank: Sequence[LossTotals]) -> LossTotals:
    """The batch's totals, added in the order of the ranks."""
    whole: dict[str, Any] = {}
    for field in fields(LossTotals):
        values = [getattr(totals, field.name) for totals in by_rank]
        whole[field.name] = max(values) if field.name in MAXIMA else sum(values)
    return LossTotals(**whole)
