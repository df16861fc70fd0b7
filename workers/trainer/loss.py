"""The decoupled clipped policy loss and its metrics.

Three policies meet in a token: the one that sampled it (behavior), the one that anchors the clip
(proximal) and the one being trained (policy). Their disagreement splits into two factors: the
importance weight proximal / behavior, a constant, and the clipped ratio policy / proximal, with
gradient (decoupled objective: Hilton et al., arXiv 2110.00641; asynchronous use: AReaL,
arXiv 2505.24298).

Axes: `N` tokens of the loss. Log-probs are in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workers.config.trainer import LossSection
from workers.engines.token_scores import TokenScores

LOG_RATIO_LIMIT = 20.0  # exp of it is finite in float32, with room for products


class TokenLosses(NamedTuple):
    """Per token, before the mean."""

    losses_N: Tensor
    weights_N: Tensor  # min(proximal / behavior, cap); no gradient
    is_clipped_N: Tensor  # bool: the clip cut this token's gradient


def clipped_losses(
    policy_N: Tensor, proximal_N: Tensor, behavior_N: Tensor, advantages_N: Tensor, by: LossSection
) -> TokenLosses:
    """L = -w min(rho A, clip(rho, 1 - low, 1 + high) A).

    rho = exp(policy - proximal), w = min(exp(proximal - behavior), cap); both log-ratios are
    clamped to +-20. Any float dtype.
    """
    ratios_N = _clamped(policy_N - proximal_N).exp()
    weights_N = _clamped(proximal_N - behavior_N).exp().clamp(max=by.weight_cap).detach()
    free_N = ratios_N * advantages_N
    bounded_N = ratios_N.clamp(1 - by.clip_low, 1 + by.clip_high) * advantages_N
    return TokenLosses(
        -weights_N * torch.minimum(free_N, bounded_N), weights_N, (bounded_N < free_N).detach()
    )


def _clamped(log_ratios_N: Tensor) -> Tensor:
    return log_ratios_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(slots=True)
class LossTotals:
    """Sums over tokens, so that micro-batches add up to the batch's own means."""

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    weight: float = 0.0
    kl: float = 0.0
    anchored: int = 0  # tokens whose proximal policy is the version that sampled them
    mismatch: float = 0.0
    mismatch_max: float = 0.0

    def add(
        self,
        losses: TokenLosses,
        scores: TokenScores,
        proximal_N: Tensor,
        behavior_N: Tensor,
        is_true_anchor_N: Tensor,
    ) -> None:
        """Count one micro-batch's tokens in; sums are taken in float64."""
        drift_N = _clamped(scores.logprobs_N.detach() - behavior_N)
        mismatch_N = (proximal_N - behavior_N).abs()[is_true_anchor_N]
        self.tokens += len(losses.losses_N)
        self.loss += _sum(losses.losses_N)
        self.entropy += _sum(scores.entropy_N)
        self.clipped += _sum(losses.is_clipped_N)
        self.weight += _sum(losses.weights_N)
        self.kl += _sum(torch.expm1(drift_N) - drift_N)
        self.anchored += len(mismatch_N)
        self.mismatch += _sum(mismatch_N)
        if len(mismatch_N):
            self.mismatch_max = max(self.mismatch_max, float(mismatch_N.max()))

    def means(self) -> dict[str, float]:
        """The batch's metrics.

        `mismatch_*`: abs(proximal - behavior) where both are the same version, so engines alone
        differ; absent if no token has such an anchor. `kl`: KL(behavior || policy) by Schulman's
        k3, mean of r - 1 - log r with r = policy / behavior.
        """
        num = max(self.tokens, 1)
        means = {
            "entropy": self.entropy / num,
            "clip_fraction": self.clipped / num,
            "weight_mean": self.weight / num,
            "kl": self.kl / num,
        }
        if self.anchored:
            means["mismatch_mean"] = self.mismatch / self.anchored
            means["mismatch_max"] = self.mismatch_max
        return means


def _sum(values: Tensor) -> float:
    return float(values.detach().sum(dtype=torch.float64))
