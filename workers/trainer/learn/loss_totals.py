"""A step's metrics, from sums that do not depend on where its batch was cut.

Axes: `N` tokens of the loss. Log-probs are in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlstreams.workers.model.token_scores import TokenScores
from rlstreams.workers.trainer.learn.loss import LOG_RATIO_LIMIT, TokenLosses


@dataclass(slots=True)
class LossTotals:
    """Sums over tokens, so that micro-batches add up to the batch's own means."""

    tokens: int = 0
    loss: float = 0.0
    shares: float = 0.0  # of the batch's loss, as it was reduced
    entropy: float = 0.0
    clipped: float = 0.0
    weight: float = 0.0
    ratio_max: float = 0.0
    applied: float = 0.0
    applied_squares: float = 0.0
    kl: float = 0.0
    compared: int = 0  # tokens with a reference
    kl_reference: float = 0.0
    anchored: int = 0  # tokens whose proximal policy is the version that sampled them
    mismatch: float = 0.0
    mismatch_max: float = 0.0
    after_pull: int = 0  # of these, tokens behind the first version of their sample
    mismatch_after_pull: float = 0.0
    replayable: int = 0  # (token, layer) rows that a forward whose routes are replayed passes
    replayed: int = 0  # of these, rows that were recorded
    flips: int = 0  # of these, rows that the live router would have chosen otherwise

    def add(
        self,
        losses: TokenLosses,
        scores: TokenScores,
        proximal_N: Tensor,
        behavior_N: Tensor,
        is_true_anchor_N: Tensor,
        is_after_pull_N: Tensor | None = None,
    ) -> None:
        """Count one micro-batch's tokens in; sums are taken in float64.

        Args:
            is_after_pull_N: bool, of tokens sampled under a later version than their sample began
                with; None: no token.
        """
        drift_N = (scores.logprobs_N.detach() - behavior_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        distance_N = (proximal_N - behavior_N).abs()
        self.tokens += len(losses.losses_N)
        self.loss += _sum(losses.losses_N)
        self.entropy += _sum(scores.entropy_N)
        self.clipped += _sum(losses.is_clipped_N)
        self.weight += _sum(losses.weights_N)
        self.kl += _sum(torch.expm1(drift_N) - drift_N)
        applied_N = losses.weights_N.double() * losses.ratios_N.double()
        self.applied += _sum(applied_N)
        self.applied_squares += _sum(applied_N.square())
        if len(losses.ratios_N):
            self.ratio_max = max(self.ratio_max, float(losses.ratios_N.max()))
        first_N = is_true_anchor_N
        if is_after_pull_N is not None:
            first_N = is_true_anchor_N & ~is_after_pull_N
            later_N = distance_N[is_true_anchor_N & is_after_pull_N]
            self.after_pull += len(later_N)
            self.mismatch_after_pull += _sum(later_N)
        mismatch_N = distance_N[first_N]
        self.anchored += len(mismatch_N)
        self.mismatch += _sum(mismatch_N)
        if len(mismatch_N):
            self.mismatch_max = max(self.mismatch_max, float(mismatch_N.max()))

    def add_reference(self, kl_N: Tensor) -> None:
        """Count the divergences from a reference in."""
        self.compared += len(kl_N)
        self.kl_reference += _sum(kl_N)

    def add_routes(self, *, num_layers: int, recorded: int, forwarded: int, flips: int) -> None:
        """Count one micro-batch's routes in; `recorded` and `forwarded` are tokens."""
        self.replayable += num_layers * forwarded
        self.replayed += num_layers * recorded
        self.flips += flips

    def means(self) -> dict[str, float]:
        """The batch's metrics.

        `mismatch_*`: abs(proximal - behavior) where both are the same version, so engines alone
        differ, of the tokens before the first pull within their sample; behind one,
        `mismatch_after_pull_mean` also has what old keys and values do. Each is absent if no token
        has such an anchor. `kl`: KL(behavior || policy) by Schulman's k3, mean of r - 1 - log r
        with r = policy / behavior. `ratio_max`: the largest policy / proximal. `ess`: effective
        sample size of the weights w rho that tokens are learnt with, (sum)^2 / (sum of squares),
        as a share of the tokens; 1 where all weigh alike. `kl_reference`: mean of the loss's KL
        terms, before `kl_coef`; absent without a reference. `routing_flips`: share of the recorded
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
        if self.compared:
            means["kl_reference"] = self.kl_reference / self.compared
        if self.anchored:
            means["mismatch_mean"] = self.mismatch / self.anchored
            means["mismatch_max"] = self.mismatch_max
        if self.after_pull:
            means["mismatch_after_pull_mean"] = self.mismatch_after_pull / self.after_pull
        if self.replayable:
            means["routing_recorded"] = self.replayed / self.replayable
        if self.replayed:
            means["routing_flips"] = self.flips / self.replayed
        return means


def _sum(values: Tensor) -> float:
    return float(values.detach().sum(dtype=torch.float64))
