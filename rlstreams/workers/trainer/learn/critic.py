"""A critic on the policy's own layers: values of states, GAE advantages, the loss of values.

The state of a token is the text before it, so its value is known before the token is drawn.
GAE: Schulman et al., arXiv 1506.02438. Tokens that are not learnt from (prompt, environment,
masked) are skipped: the next state is that of the sample's next token of the loss.

Axes: `N` tokens of the loss of a micro-batch, row by row; `n` those of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.model.token_scores import TokenScores, ValueHead
from rlstreams.workers.trainer.learn.advantage import standardized
from rlstreams.workers.trainer.learn.batch_factors import Look, flat, placed
from rlstreams.workers.trainer.learn.loss import TokenLosses
from rlstreams.workers.trainer.learn.loss_totals import LossSums
from rlstreams.workers.trainer.learn.packing import Batch

Float64s = npt.NDArray[np.float64]
PREFIX = "value_head."  # of the names of its parameters


def named_head(head: ValueHead) -> dict[str, nn.Parameter]:
    """A head's parameters by their names beside the model's. The head is in checkpoints and redone,
    and no part of the policy: neither published nor exported (decision 0060)."""
    return {PREFIX + name: one for name, one in head.named_parameters()}


def gae(values_n: Float64s, reward: float, by: LossSection) -> Float64s:
    """Advantages before they are scaled, of the tokens of one sample, float64.

    d_t = r_t + gamma V_(t+1) - V_t, and A_t = d_t + gamma lambda A_(t+1); r is 0 but at the last
    token, where it is the sample's, and V behind it is 0.
    """
    found_n = np.empty(len(values_n))
    later, next_value = 0.0, 0.0
    for at in reversed(range(len(values_n))):
        own = reward if at == len(values_n) - 1 else 0.0
        delta = own + by.gae_gamma * next_value - values_n[at]
        later = found_n[at] = delta + by.gae_gamma * by.gae_lambda * later
        next_value = values_n[at]
    return found_n


def with_gae(batch: Batch, looks: Sequence[Look], by: LossSection) -> Batch:
    """The batch with an advantage, a value and a return for each token; itself without `gae`.

    Returns are A + V. Then A is standardized over the batch's tokens (`normalize_std`). In the
    batch, an advantage of a sample is its reward.
    """
    if by.advantage != "gae":
        return batch
    values, advantages = [], []
    for part, look in zip(batch.micro_batches, looks, strict=True):
        values_N = look.values_n.astype(np.float64)
        borders = np.cumsum([0, *part.loss_tokens_by_row])
        rewards = part.advantages_B[part.loss_mask_BT.any(1)]
        rows = zip(pairwise(borders), rewards, strict=True)
        own = [gae(values_N[start:end], float(reward), by) for (start, end), reward in rows]
        values.append(values_N)
        advantages.append(np.concatenate([*own, np.zeros(0)]))
    returns = [a_N + v_N for a_N, v_N in zip(advantages, values, strict=True)]
    if by.normalize_std:
        ends = np.cumsum([len(one) for one in advantages])[:-1]
        advantages = np.split(standardized(np.concatenate(advantages)), ends)
    filled = (
        replace(
            part,
            advantages_BT=placed(part, a_N.astype(np.float32)),
            values_BT=placed(part, v_N.astype(np.float32)),
            returns_BT=placed(part, r_N.astype(np.float32)),
        )
        for part, a_N, v_N, r_N in zip(
            batch.micro_batches, advantages, values, returns, strict=True
        )
    )
    return replace(batch, micro_batches=tuple(filled))


def value_losses(
    values_N: Tensor, start_N: Tensor, returns_N: Tensor, by: LossSection
) -> tuple[Tensor, Tensor]:
    """Loss of each token's value, max((V - R)^2, (V' - R)^2) / 2, where V' is V, at most
    `value_clip` from the value at the step's start; and whether its gradient was cut off. As PPO's
    reference code."""
    squares_N = (values_N - returns_N).square() / 2
    if not by.value_clip:
        return squares_N, torch.zeros_like(values_N, dtype=torch.bool)
    near_N = start_N + (values_N - start_N).clamp(-by.value_clip, by.value_clip)
    clipped_N = (near_N - returns_N).square() / 2
    return torch.maximum(squares_N, clipped_N), clipped_N > squares_N


def with_values(
    losses: TokenLosses,
    scores: TokenScores,
    start_N: Tensor,
    returns_N: Tensor,
    by: LossSection,
    sums: LossSums,
) -> TokenLosses:
    """The same losses, with `value_coef` times its value loss added to each token's, which is also
    counted in `sums`."""
    assert scores.values_N is not None, "a batch with returns was looked at by a value head"
    found_N, is_clipped_N = value_losses(scores.values_N, start_N, returns_N, by)
    sums.add_values(found_N, is_clipped_N)
    return losses._replace(losses_N=losses.losses_N + by.value_coef * found_N)


def value_figures(batch: Batch) -> dict[str, float]:
    """`explained_variance`: 1 - var(R - V) / var(R) over the batch's tokens, V of the step's start:
    1 where values equal the returns, 0 where a constant would do as well. Absent without values,
    and where all returns are equal."""
    if any(part.returns_BT is None for part in batch.micro_batches):
        return {}
    returns_N = flat(batch, "returns_BT").astype(np.float64)
    left_N = returns_N - flat(batch, "values_BT")
    whole = float(returns_N.var())
    return {"explained_variance": 1 - float(left_N.var()) / whole} if whole else {}
