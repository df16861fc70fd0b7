"""Importance weights proximal / behavior, for differences of the sampling engine or an older
policy; cut, masked or rejected where they are too far from 1.

Axes: `N` tokens of the loss, row by row; `R` rows (samples) that have some.
Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlstreams.workers.config.loss import RATIO_MAX, LossSection

Floats = npt.NDArray[np.float32]
LOG_RATIO_LIMIT = 20.0  # exp of it is finite in float32, with room for products


def correction_weights(
    proximal_N: Tensor, behavior_N: Tensor, counts_R: Sequence[int], by: LossSection
) -> Tensor:
    """The weight w of each token's loss; 0 where it is rejected. No gradient.

    With l = proximal - behavior of a token (or their sum over its row, or the mean of that: the
    geometric mean), clamped to +-20:

    - truncate: min(exp(l), cap); of tokens TIS (fengyao.notion.site/off-policy-rl).
    - mask: exp(l) within [floor, cap], else 0; of tokens IcePop (arXiv 2510.18855), of sequences
      MIS (richardli.xyz/rl-collapse).

    `veto_*` and `rejection` set weights to 0 besides (`is_rejected`).

    Args:
        counts_R: tokens of each row, which sum to N; none is 0.
    """
    log_ratios_N = proximal_N - behavior_N
    rejected_N = is_rejected(log_ratios_N, counts_R, by)
    if by.correction_level != "token":
        by_row = torch.sum if by.correction_level == "sequence" else torch.mean
        log_ratios_N = of_rows(log_ratios_N, counts_R, by_row)
    weights_N = clamped(log_ratios_N).exp()
    match by.correction:
        case "truncate":
            weights_N = weights_N.clamp(max=by.weight_cap)
        case "mask":
            is_kept_N = (weights_N >= by.weight_floor) & (weights_N <= by.weight_cap)
            weights_N = torch.where(is_kept_N, weights_N, 0.0)
        case "none":
            weights_N = torch.ones_like(weights_N)
    if rejected_N is not None:
        weights_N = torch.where(rejected_N, 0.0, weights_N)
    return weights_N.detach()


def sample_weights(proximal: Floats, behavior: Floats, by: LossSection) -> list[float]:
    """Weights of one sample's tokens, before the batch's factors."""
    proximal_N, behavior_N = torch.from_numpy(proximal), torch.from_numpy(behavior)
    found: list[float] = correction_weights(proximal_N, behavior_N, [len(behavior)], by).tolist()
    return found


def is_rejected(log_ratios_N: Tensor, counts_R: Sequence[int], by: LossSection) -> Tensor | None:
    """Tokens that `veto_*` or `rejection` leave out, bool; None: neither is set.

    A veto takes the whole row for one of its tokens. The statistics are those of verl's
    `rollout_rs`, after Schulman (joschu.net/blog/kl-approx.html).
    """
    log_N = clamped(log_ratios_N)
    found = []
    if by.veto_low or by.veto_high:
        ratios_N = log_N.exp()
        bad_N = ratios_N < by.veto_low
        if by.veto_high:
            bad_N = bad_N | (ratios_N > by.veto_high)
        found.append(of_rows(bad_N.to(log_N.dtype), counts_R, torch.amax) > 0)
    if by.rejection != "none":
        statistic_N = {
            "k1": lambda: log_N,
            "k2": lambda: log_N.square() / 2,
            "k3": lambda: log_N.expm1() - log_N,
        }[by.rejection]()
        if by.rejection_level != "token":
            by_row = _BY_ROW[by.rejection_level]
            statistic_N = of_rows(statistic_N, counts_R, by_row)
        if by.rejection == "k1":
            statistic_N = clamped(statistic_N).exp()
            found.append(statistic_N < by.rejection_low)
        found.append(statistic_N > by.rejection_high)
    return torch.stack(found).any(0) if found else None


def of_rows(values_N: Tensor, counts_R: Sequence[int], by_row: Callable[..., Tensor]) -> Tensor:
    """For each token the result of `by_row` on its row."""
    counts = list(counts_R)
    found_R = torch.stack([by_row(row_T) for row_T in torch.split(values_N, counts)])
    repeats_R = torch.tensor(counts, device=found_R.device)
    return found_R.repeat_interleave(repeats_R, output_size=len(values_N))


def clamped(log_ratios_N: Tensor) -> Tensor:
    """Log-ratios clamped to +-20."""
    return log_ratios_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def bounded_ratios(policy_N: Tensor, proximal_N: Tensor) -> Tensor:
    """min(rho, 10) of each token, rho = policy / proximal; its gradient is as many times that of
    log policy, beyond the bound too, as in DPPO's own code (github.com/sail-sg/Stable-RL, commit
    c6af1d1, `compute_policy_loss_with_mask`, whose `clip_ratio_c` is 10 unless set).

    For losses that multiply by the ratio and do not clip it: one token that the proximal policy
    found absurd would outweigh the batch.
    """
    ratios_N = clamped(policy_N.detach() - proximal_N).exp().clamp(max=RATIO_MAX)
    return ratios_N * (1 + policy_N - policy_N.detach())


_BY_ROW: dict[str, Callable[..., Tensor]] = {
    "sequence_sum": torch.sum,
    "sequence_mean": torch.mean,
    "sequence_max": torch.amax,
}
