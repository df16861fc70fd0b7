"""The clipped policy losses, and what to watch beside them.

Three policies meet in a token: the one that sampled it (behavior), the one that anchors the clip
(proximal) and the one that learns (policy). Here the anchor is the *version that sampled*, scored
again by the log-prob worker (infra/decisions/0006-scoring-version.md). So this is PPO against the
behavior version, plus token-level truncated importance sampling: the weight w = proximal / behavior
corrects what the sampling engine computes otherwise than the trainer, and nothing else; staleness
is all in the ratio policy / proximal, and falls to the clip. It is not decoupled PPO (Hilton et
al., arXiv 2110.00641; AReaL, arXiv 2505.24298): that has the same form and anchors at a newer
policy, so that there w carries the staleness.

Axes: `N` tokens of the loss, row by row; `R` rows (samples) that have some.
Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from rlstreams.workers.config.loss import LossSection

LOG_RATIO_LIMIT = 20.0  # exp of it is finite in float32, with room for products
SEQUENCE_LOG_LIMIT = 10.0  # of a sequence's mean log-ratio, from above, as in verl


class TokenLosses(NamedTuple):
    """Per token, before the reduction."""

    losses_N: Tensor
    weights_N: Tensor  # min(proximal / behavior, cap); no gradient
    ratios_N: Tensor  # policy / proximal, of the token or (gspo) its sequence; no gradient
    is_clipped_N: Tensor  # bool: the clip cut this token's gradient (cispo: its weight)


def policy_losses(
    policy_N: Tensor,
    proximal_N: Tensor,
    behavior_N: Tensor,
    advantages_N: Tensor,
    counts_R: Sequence[int],
    by: LossSection,
) -> TokenLosses:
    """The loss that `by.kind` names, token by token; any float dtype.

    With rho = exp(policy - proximal) and w = min(exp(proximal - behavior), cap), no gradient
    through w, both log-ratios clamped to +-20, and clip(x) into [1 - low, 1 + high]. The formulas
    are set out in infra/docs/loss.md:

    - ppo: -w min(rho A, clip(rho) A); where A < 0 at most -w dual A (Ye et al., arXiv 1912.09729).
    - gspo: the same without `dual` and with the sequence's s = exp(mean of policy - proximal over
      its tokens) for rho; each token has its own gradient (GSPO-token, Zheng et al., arXiv
      2507.18071). The mean is clamped to -20 from below and 10 from above, its tokens are not.
    - cispo: -w min(rho, 1 + high) A log pi, no gradient through the ratio (arXiv 2506.13585, which
      sets no lower bound).

    Args:
        counts_R: tokens of each row, which sum to N; none is 0.
    """
    weights_N = _clamped(proximal_N - behavior_N).exp().clamp(max=by.weight_cap).detach()
    log_ratios_N = policy_N - proximal_N
    match by.kind:
        case "ppo":
            ratios_N, dual = _clamped(log_ratios_N).exp(), by.clip_dual
        case "gspo":
            ratios_N, dual = _of_sequences(log_ratios_N, counts_R).exp(), 0.0
        case "cispo":
            ratios_N = _clamped(log_ratios_N).exp().detach()
            clipped_N = ratios_N.clamp(max=1 + by.clip_high)
            losses_N = -weights_N * clipped_N * advantages_N * policy_N
            return TokenLosses(losses_N, weights_N, ratios_N, ratios_N != clipped_N)
        case kind:
            assert_never(kind)
    free_N = ratios_N * advantages_N
    bounded_N = ratios_N.clamp(1 - by.clip_low, 1 + by.clip_high) * advantages_N
    least_N = torch.minimum(free_N, bounded_N)
    is_clipped_N = bounded_N < free_N
    if dual:
        floor_N = dual * advantages_N
        is_floored_N = (advantages_N < 0) & (least_N < floor_N)
        least_N = torch.where(is_floored_N, floor_N, least_N)
        is_clipped_N = is_clipped_N | is_floored_N
    return TokenLosses(-weights_N * least_N, weights_N, ratios_N.detach(), is_clipped_N.detach())


def reduced(
    losses_N: Tensor,
    counts_R: Sequence[int],
    by: LossSection,
    *,
    num_batch_tokens: int,
    num_batch_rows: int,
    num_batch_samples: int,
) -> Tensor:
    """A micro-batch's share of the batch's loss; the shares add up.

    - token: the mean over all tokens of the batch.
    - sequence: the mean over rows of each row's mean.
    - constant: the mean over all samples, masked ones too, of each one's sum, divided by one length
      for all (Dr. GRPO, arXiv 2503.20783): a factor that no mask changes.

    Args:
        num_batch_tokens: of the loss, in the whole batch.
        num_batch_rows: rows of the whole batch that have some.
        num_batch_samples: of the whole batch.
    """
    if by.reduce == "token":
        return losses_N.sum() / num_batch_tokens
    if by.reduce == "constant":
        return losses_N.sum() / (num_batch_samples * by.constant_tokens)
    means_R = torch.stack([row_T.mean() for row_T in torch.split(losses_N, list(counts_R))])
    return means_R.sum() / num_batch_rows


def _of_sequences(log_ratios_N: Tensor, counts_R: Sequence[int]) -> Tensor:
    """log s per token: the value of its sequence, with the gradient of its own log-prob."""
    counts = list(counts_R)
    means_R = torch.stack([row_T.mean() for row_T in torch.split(log_ratios_N.detach(), counts)])
    repeats_R = torch.tensor(counts, device=means_R.device)
    means_N = means_R.repeat_interleave(repeats_R, output_size=len(log_ratios_N))
    own_N = log_ratios_N - log_ratios_N.detach()  # 0, with the gradient
    return (own_N + means_N).clamp(-LOG_RATIO_LIMIT, SEQUENCE_LOG_LIMIT)


def _clamped(log_ratios_N: Tensor) -> Tensor:
    return log_ratios_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
