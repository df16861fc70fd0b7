"""The policy losses: one table of bounds on a token's ratio, and the reduction to one number.

Three policies meet in a token: the one that sampled it (behavior), the denominator of its ratio
(proximal) and the one that learns (policy). By default the proximal one is the *version that
sampled*, scored again by the log-prob worker (infra/decisions/0006-scoring-version.md): the weight
w = proximal / behavior corrects only differences between the sampling engine and the trainer;
all staleness is in the ratio policy / proximal, and is left to the clip. Decoupled PPO
(Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298) has the same form and a newer proximal
policy, so that there w carries the staleness: `proximal_of`.

Axes: `N` tokens of the loss, row by row; `R` rows (samples) that have some.
Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.trainer.learn.correction import (
    LOG_RATIO_LIMIT,
    bounded_ratios,
    clamped,
    correction_weights,
    of_rows,
)

SEQUENCE_LOG_LIMIT = 10.0  # of a sequence's mean log-ratio, from above, as in verl
TINY = 1e-12  # least probability of all other tokens


class TokenLosses(NamedTuple):
    """Losses per token, before the reduction."""

    losses_N: Tensor
    weights_N: Tensor  # importance weight, 0 of a rejected token; no gradient
    ratios_N: Tensor  # policy / proximal, of the token or (gspo) its sequence; no gradient
    is_clipped_N: Tensor  # bool: the token's gradient was cut off (cispo: its weight was cut)


class LossTokens(NamedTuple):
    """Inputs of a loss, by token."""

    policy_N: Tensor  # log-probs, with gradient
    proximal_N: Tensor
    behavior_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor  # importance weights, 0 of a rejected token
    counts_R: Sequence[int]  # tokens of each row
    gains_N: Tensor | None = None  # of a teacher, with gradient
    ages_N: Tensor | None = None  # staleness, versions
    entropy_N: Tensor | None = None  # of the policy, nats, with gradient
    reference_N: Tensor | None = None  # None: the run compares with no reference

    def ratios(self) -> Tensor:
        """rho = policy / proximal of each token, the log-ratio clamped to +-20."""
        return clamped(self.policy_N - self.proximal_N).exp()

    def bounded(self) -> Tensor:
        """min(rho, 10): `correction.bounded_ratios`."""
        return bounded_ratios(self.policy_N, self.proximal_N)


# Loss, ratio, and whether its gradient was cut off: by token.
Bounded = tuple[Tensor, Tensor, Tensor]
LossCall = Callable[[LossTokens, LossSection], Bounded]


def policy_losses(
    policy_N: Tensor,
    proximal_N: Tensor,
    behavior_N: Tensor,
    advantages_N: Tensor,
    counts_R: Sequence[int],
    by: LossSection,
    factors_N: Tensor | None = None,
    gains_N: Tensor | None = None,
    *,
    call: LossCall | None = None,
    **more: Tensor | None,
) -> TokenLosses:
    """The loss that `by.kind` names, token by token; any float dtype.

    Each is -w times the gain that its function states, with rho = policy / proximal, advantage A
    and clip(x) into [1 - low, 1 + high]; no gradient goes through w.

    Args:
        counts_R: tokens of each row, which sum to N; none is 0.
        factors_N: on the weights, where the whole batch decides them (`batch_factors.py`).
        gains_N: for `distill`: a teacher's gain for each token (`distill.py`).
        call: the loss, where it may be the user's (`own.loss_of`).
        more: further fields of `LossTokens`.
    """
    weights_N = correction_weights(proximal_N, behavior_N, counts_R, by)
    if factors_N is not None:
        weights_N = weights_N * factors_N
    if by.off_policy_max:
        # Off-policy sequence masking: DeepSeek-V3.2, arXiv 2512.02556, equation 9.
        drift_N = of_rows((behavior_N - policy_N).detach(), counts_R, torch.mean)
        is_off_N = (advantages_N < 0) & (drift_N > by.off_policy_max)
        weights_N = torch.where(is_off_N, 0.0, weights_N)
    tokens = LossTokens(
        policy_N, proximal_N, behavior_N, advantages_N, weights_N, counts_R, gains_N, **more
    )
    losses_N, ratios_N, is_clipped_N = (call or LOSSES[by.kind])(tokens, by)
    return TokenLosses(losses_N, weights_N, ratios_N.detach(), is_clipped_N.detach())


def proximal_of(
    sampled_N: Tensor,
    behavior_N: Tensor,
    policy_N: Tensor,
    by: LossSection,
    *,
    start_N: Tensor | None = None,
    ages_N: Tensor | None = None,
) -> Tensor:
    """The log-probs that `by.proximal` names; no gradient.

    `interpolated` is between the sampling version, a steps old, and the policy in hand, at
    (a - 1) / a of the way: one step behind it (AReaL's `prox_approx`, there from the sampler's own
    log-probs). Up to a = 1 it is the sampling version itself.

    Args:
        sampled_N: under the version that sampled.
        start_N: under the weights before the step's first update.
        ages_N: staleness of each token, versions.
    """
    match by.proximal:
        case "behavior":
            return behavior_N
        case "step_start":
            assert start_N is not None, "the batch was looked at first"
            return start_N
        case "interpolated":
            assert ages_N is not None, "packed with every batch"
            share_N = (ages_N - 1).clamp(min=0) / ages_N.clamp(min=1)
            return sampled_N + share_N * (policy_N.detach() - sampled_N)
    return sampled_N


def _ppo(tokens: LossTokens, by: LossSection) -> Bounded:
    """min(rho A, clip(rho) A); where A < 0 at least dual A (Ye et al., arXiv 1912.09729)."""
    return _clipped(tokens, tokens.ratios(), by, by.clip_dual)


def _gspo(tokens: LossTokens, by: LossSection) -> Bounded:
    """PPO's with the sequence's s = exp(mean of policy - proximal) for rho, without the dual bound;
    each token has its own gradient (GSPO-token, Zheng et al., arXiv 2507.18071). The mean is
    clamped to -20 from below and 10 from above, its tokens are not."""
    log_ratios_N = tokens.policy_N - tokens.proximal_N
    means_N = of_rows(log_ratios_N.detach(), tokens.counts_R, torch.mean)
    own_N = log_ratios_N - log_ratios_N.detach()  # 0, with the gradient
    ratios_N = (own_N + means_N).clamp(-LOG_RATIO_LIMIT, SEQUENCE_LOG_LIMIT).exp()
    return _clipped(tokens, ratios_N, by, 0.0)


def _cispo(tokens: LossTokens, by: LossSection) -> Bounded:
    """min(rho, 1 + high) A log pi, no gradient through the ratio (arXiv 2506.13585, which sets no
    lower bound)."""
    ratios_N = tokens.ratios().detach()
    clipped_N = ratios_N.clamp(max=1 + by.clip_high)
    losses_N = -tokens.weights_N * clipped_N * tokens.advantages_N * tokens.policy_N
    return losses_N, ratios_N, ratios_N != clipped_N


def _sapo(tokens: LossTokens, by: LossSection) -> Bounded:
    """4 / tau sigmoid(tau (rho - 1)) A, tau by the sign of A (arXiv 2511.20347)."""
    ratios_N = tokens.ratios()
    tau_N = torch.full_like(ratios_N, by.tau_negative)
    tau_N[tokens.advantages_N > 0] = by.tau_positive
    gates_N = torch.sigmoid(tau_N * (ratios_N - 1)) * 4 / tau_N
    never_N = torch.zeros_like(ratios_N, dtype=torch.bool)
    return -tokens.weights_N * (gates_N * tokens.advantages_N), ratios_N, never_N


def _dppo(tokens: LossTokens, by: LossSection) -> Bounded:
    """min(rho, 10) A, or 0 where the token moves away and is further off than `divergence_max`: by
    total variation or KL of the two distributions {this token, all others} (arXiv 2602.04879)."""
    ratios_N = tokens.ratios()
    p_N = tokens.proximal_N.exp().clamp(max=1)
    q_N = tokens.policy_N.detach().exp().clamp(max=1)
    if by.divergence == "tv":
        distances_N = (q_N - p_N).abs()
    else:
        rest_N = torch.special.xlogy(1 - p_N, (1 - p_N) / (1 - q_N).clamp(min=TINY))
        distances_N = p_N * (tokens.proximal_N - tokens.policy_N.detach()) + rest_N
    is_away_N = torch.where(tokens.advantages_N > 0, ratios_N > 1, ratios_N < 1)
    is_masked_N = is_away_N & (distances_N > by.divergence_max)
    gains_N = torch.where(is_masked_N, 0.0, tokens.bounded() * tokens.advantages_N)
    return -tokens.weights_N * gains_N, ratios_N, is_masked_N


def _m2po(tokens: LossTokens, _: LossSection) -> Bounded:
    """min(rho, 10) A (arXiv 2510.01161); the mask is in the weights
    (`batch_factors.second_moment_mask`), and bounds only a mean: one of many tokens may be
    anywhere."""
    gains_N = tokens.bounded() * tokens.advantages_N
    never_N = torch.zeros_like(gains_N, dtype=torch.bool)
    return -tokens.weights_N * gains_N, tokens.ratios(), never_N


def _sft(tokens: LossTokens, _: LossSection) -> Bounded:
    """A log pi: likelihood of the recorded tokens; with A of 1 and 0 rejection-sampling fine-tuning
    (Yuan et al., arXiv 2308.01825), with A the reward reward-weighted regression."""
    never_N = torch.zeros_like(tokens.weights_N, dtype=torch.bool)
    gains_N = tokens.advantages_N * tokens.policy_N
    return -tokens.weights_N * gains_N, tokens.ratios(), never_N


def _distill(tokens: LossTokens, _: LossSection) -> Bounded:
    """A times the teacher's gain (`distill.py`)."""
    assert tokens.gains_N is not None, "the samples were checked"
    never_N = torch.zeros_like(tokens.weights_N, dtype=torch.bool)
    gains_N = tokens.advantages_N * tokens.gains_N
    return -tokens.weights_N * gains_N, tokens.ratios(), never_N


LOSSES: Mapping[str, LossCall] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo": _dppo,
    "m2po": _m2po,
    "sft": _sft,
    "distill": _distill,
}


def _clipped(tokens: LossTokens, ratios_N: Tensor, by: LossSection, dual: float) -> Bounded:
    advantages_N = tokens.advantages_N
    free_N = ratios_N * advantages_N
    bounded_N = ratios_N.clamp(1 - by.clip_low, 1 + by.clip_high) * advantages_N
    least_N = torch.minimum(free_N, bounded_N)
    is_clipped_N = bounded_N < free_N
    if dual:
        floor_N = dual * advantages_N
        is_floored_N = (advantages_N < 0) & (least_N < floor_N)
        least_N = torch.where(is_floored_N, floor_N, least_N)
        is_clipped_N = is_clipped_N | is_floored_N
    return -tokens.weights_N * least_N, ratios_N, is_clipped_N


def reduced(
    losses_N: Tensor,
    counts_R: Sequence[int],
    by: LossSection,
    *,
    num_batch_tokens: int,
    num_batch_learnt: int,
    num_batch_samples: int,
    shares_R: Tensor | None = None,
) -> Tensor:
    """A micro-batch's share of the batch's loss; the shares add up.

    - token: the mean over all tokens of the batch.
    - sequence: the mean over samples of each one's mean over its tokens, in all of its rows.
    - constant: the mean over all samples, masked ones too, of each one's sum, divided by one length
      for all (Dr. GRPO, arXiv 2503.20783): a factor that no mask changes.

    Args:
        num_batch_tokens: of the loss, in the whole batch.
        num_batch_learnt: samples of the whole batch that have some.
        num_batch_samples: of the whole batch.
        shares_R: share of its sample's tokens that a row has; None: each row is a sample.
    """
    if by.reduce == "token":
        return losses_N.sum() / num_batch_tokens
    if by.reduce == "constant":
        return losses_N.sum() / (num_batch_samples * by.constant_tokens)
    means_R = torch.stack([row_T.mean() for row_T in torch.split(losses_N, list(counts_R))])
    if shares_R is not None:
        means_R = means_R * shares_R.to(means_R.dtype)
    return means_R.sum() / num_batch_learnt
