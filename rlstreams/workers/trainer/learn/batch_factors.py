"""Factors of the tokens' weights that the whole batch decides: M2PO's mask, the filter by entropy,
normalised weights. Computed on the host before the batch is dealt out, so no cut changes them.

Axes: `N` tokens of the loss of the whole batch, micro-batch by micro-batch, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.model.token_scores import TokenScores
from rlstreams.workers.trainer.learn.correction import correction_weights
from rlstreams.workers.trainer.learn.loss import proximal_of
from rlstreams.workers.trainer.learn.packing import Batch, Bools, Float32s, MicroBatch


class Look(NamedTuple):
    """Scores of each loss token of a micro-batch, before the step's first update."""

    logprobs_n: Float32s  # nats
    entropy_n: Float32s  # nats
    values_n: Float32s  # empty without a value head


def look_of(scores: TokenScores) -> Look:
    """A look with arrays on the host."""
    values_N = torch.zeros(0) if scores.values_N is None else scores.values_N
    found = (scores.logprobs_N, scores.entropy_N, values_N)
    return Look(*(one.cpu().numpy() for one in found))


NOTHING = Look(*(np.zeros(0, np.float32) for _ in range(3)))


def with_factors(batch: Batch, looks: Sequence[Look], by: LossSection) -> Batch:
    """The batch with the factors that `by` asks for; the same batch if it asks for none.

    Args:
        looks: of each micro-batch under the weights before the step's first update; none unless
            `by.looks_first`.
    """
    if not looks and not by.weight_normalize:
        return batch
    parts = batch.micro_batches
    starts = [look.logprobs_n for look in looks] if looks else [None] * len(parts)
    ends = np.cumsum([part.num_loss_tokens for part in parts])
    factors = np.split(_factors(batch, looks, by), ends[:-1])
    filled = (
        replace(part, factors_BT=placed(part, own_n), start_logprobs_BT=placed(part, start_n))
        for part, own_n, start_n in zip(parts, factors, starts, strict=True)
    )
    return replace(batch, micro_batches=tuple(filled))


def placed(part: MicroBatch, values_n: Float32s | None) -> Float32s | None:
    """Values of the loss tokens in their columns, 0 elsewhere."""
    if values_n is None:
        return None
    values_BT = np.zeros(part.loss_mask_BT.shape, np.float32)
    values_BT[part.loss_mask_BT] = values_n
    return values_BT


def _factors(batch: Batch, looks: Sequence[Look], by: LossSection) -> Float32s:
    factors_N = np.ones(batch.num_loss_tokens, np.float32)
    behavior_N = flat(batch, "behavior_logprobs_BT")
    if by.kind == "m2po":
        start_N = np.concatenate([look.logprobs_n for look in looks])
        factors_N *= second_moment_mask(start_N, behavior_N, by.second_moment_max)
    if by.entropy_share < 1:
        entropy_N = np.concatenate([look.entropy_n for look in looks])
        factors_N *= entropy_mask(entropy_N, by.entropy_share)
    if by.weight_normalize:
        sampled_N = torch.from_numpy(flat(batch, "proximal_logprobs_BT"))
        start_N = (
            np.concatenate([look.logprobs_n for look in looks]) if looks else sampled_N.numpy()
        )
        mu_N = torch.from_numpy(behavior_N)
        proximal_N = proximal_of(sampled_N, mu_N, sampled_N, by, start_N=torch.from_numpy(start_N))
        counts = list(chain.from_iterable(m.loss_tokens_by_row for m in batch.micro_batches))
        mean = float(correction_weights(proximal_N, mu_N, counts, by).double().mean())
        factors_N /= np.float32(mean or 1.0)  # if all are rejected none is left to scale
    return factors_N


def second_moment_mask(policy_N: Float32s, behavior_N: Float32s, most: float) -> Bools:
    """Tokens that M2PO learns from: of the values (log policy / behavior)^2 the largest are left
    out, ties together, until the mean of the others is at most `most` (arXiv 2510.01161)."""
    moments_N = np.square(policy_N.astype(np.float64) - behavior_N)
    ordered_N = np.sort(moments_N)
    # The mean of the smallest tokens never falls as more are taken in.
    num = int((np.cumsum(ordered_N) / np.arange(1, len(ordered_N) + 1) <= most).sum())
    if num == len(ordered_N):
        return np.ones(len(ordered_N), np.bool_)
    kept_N: Bools = moments_N < ordered_N[num]
    return kept_N


def entropy_mask(entropy_N: Float32s, share: float) -> Bools:
    """The share of tokens of highest entropy: from its quantile on (arXiv 2506.01939: 0.2)."""
    kept_N: Bools = entropy_N >= np.quantile(entropy_N.astype(np.float64), 1 - share)
    return kept_N


def flat(batch: Batch, name: str) -> npt.NDArray[Any]:
    """An array of the micro-batches at the loss tokens of the whole batch, [N]."""
    return np.concatenate([getattr(m, name)[m.loss_mask_BT] for m in batch.micro_batches])
