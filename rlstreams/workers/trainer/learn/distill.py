"""Gain of the loss `distill` by token, from a teacher's log-probs of the student's own tokens.

On-policy distillation: Agarwal et al., arXiv 2306.13649 (GKD); with one token's estimate Lu and
Thinking Machines, thinkingmachines.ai/blog/on-policy-distillation.

Axes: `N` tokens of the loss, row by row; `K` likeliest tokens of the teacher, the likeliest first.
Log-probs are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.model.token_scores import TokenScores
from rlstreams.workers.trainer.learn.correction import bounded_ratios, clamped
from rlstreams.workers.trainer.learn.packing import Batch

LEAST_REST = 1e-12  # probability of all tokens that are not among the K


def with_teacher(batch: Batch, samples: Sequence[ScoredTrajectory], top_k: int) -> Batch:
    """The batch with the teacher's likeliest tokens; itself without `top_k`.

    Args:
        samples: of the batch, each with at least `top_k` tokens, as was checked.
    """
    if not top_k:
        return batch
    filled = []
    for members, part in zip(batch.cut.members, batch.micro_batches, strict=True):
        shape = (*part.token_ids_BT.shape, top_k)
        ids_BTK, logprobs_BTK = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for row, index in enumerate(members):
            segments = samples[index].trajectory.segments
            ends = np.cumsum([len(segment.token_ids) for segment in segments])
            for score in samples[index].scores:
                ids, logprobs = score.reference_top_ids, score.reference_top_logprobs
                assert ids is not None, "checked before"
                assert logprobs is not None, "likewise"
                here = slice(ends[score.segment] - len(ids), ends[score.segment])
                ids_BTK[row, here] = ids.numpy()[:, :top_k]
                logprobs_BTK[row, here] = logprobs.numpy()[:, :top_k]
        filled.append(replace(part, top_ids_BTK=ids_BTK, top_logprobs_BTK=logprobs_BTK))
    return replace(batch, micro_batches=tuple(filled))


def taught(
    scores: TokenScores,
    proximal_N: Tensor,
    teacher_N: Tensor,
    teacher_NK: Tensor | None,
    by: LossSection,
) -> tuple[Tensor, Tensor]:
    """The gain of each token, and its divergence: an estimate that may be below 0 where only the
    sampled token is compared.

    Args:
        teacher_N: log-probs of the sampled token.
        teacher_NK: log-probs of the tokens in `scores.top_NK`; None: none were asked for.
    """
    if teacher_NK is not None:
        assert scores.top_NK is not None, "the teacher's tokens were asked for"
        found_N = divergences(scores.top_NK, teacher_NK, by.distill_beta)
        return -found_N, found_N
    policy_N = scores.logprobs_N
    return sampled_gains(policy_N, proximal_N, teacher_N), policy_N - teacher_N


def sampled_gains(policy_N: Tensor, proximal_N: Tensor, teacher_N: Tensor) -> Tensor:
    """min(rho, 10) (teacher - policy) of the sampled token, no gradient through the difference.

    Weighed by w, its mean over a distribution that sampled is minus the gradient of the reverse KL
    divergence at each state, where no ratio is above 10. Needs no clip: a token that has become as
    likely as the teacher has it is pushed no further.
    """
    return bounded_ratios(policy_N, proximal_N) * clamped(teacher_N - policy_N.detach())


def divergences(policy_NK: Tensor, teacher_NK: Tensor, beta: float) -> Tensor:
    """Divergence of the teacher's P and the policy's Q at each token, at least 0, with gradient.

    1 is KL(Q || P), 0 is KL(P || Q); else the generalized Jensen-Shannon divergence
    beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q. All tokens beyond the K
    count as one, so it is at most the divergence of the whole distributions, and 0 only where all
    K agree.
    """
    p_NK, q_NK = _with_rest(teacher_NK), _with_rest(policy_NK)
    if beta == 1:
        found_N = _kl(q_NK, p_NK)
    elif beta == 0:
        found_N = _kl(p_NK, q_NK)
    else:
        m_NK = torch.logaddexp(p_NK + math.log(beta), q_NK + math.log1p(-beta))
        found_N = beta * _kl(p_NK, m_NK) + (1 - beta) * _kl(q_NK, m_NK)
    return found_N.to(policy_NK.dtype)


def _with_rest(logprobs_NK: Tensor) -> Tensor:
    """Append the log-prob of all other tokens, in float64: in float32 a rest of 1e-7 would be the
    rounding error of 1 less a sum of 1, 0 or twice as much."""
    logprobs_NK = logprobs_NK.double()
    sum_N = logprobs_NK.logsumexp(-1).clamp(max=-LEAST_REST)
    return torch.cat([logprobs_NK, (-sum_N.expm1()).log()[:, None]], -1)


def _kl(p_NK: Tensor, q_NK: Tensor) -> Tensor:
    return (p_NK.exp() * (p_NK - q_NK)).sum(-1)
