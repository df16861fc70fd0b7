"""A head whose vocabulary is spread over the ranks of one matrix: each has some of the logits.

Axes: `n` chosen token of a chunk, `V` this rank's part of the vocabulary, `K` other tokens, `L` the
chosen one and those.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlstreams.workers.model.head import Head, chunk_gradient
from rlstreams.workers.model.megatron.build import RankModel


class SplitHead(Head):
    """A head whose vocabulary is spread over the ranks of one matrix."""

    def __init__(self, rows: int, rank_model: RankModel) -> None:
        super().__init__(rows)
        layout = rank_model.layout
        share = rank_model.config.vocab_size // layout.tp
        self._first = share * layout.tp_rank(rank_model.rank)
        self.scores, self.gradient = self._scores, self._gradient

    @property
    def is_compiled(self) -> bool:
        """Always false."""
        return False

    def _scores(
        self, logits_nV: Tensor, ids_n: Tensor, temperature_n: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `chunk_scores`, of this rank's part of the logits."""
        group = group_of("tensor_model_parallel")
        scaled_nV = logits_nV.float() / temperature_n[:, None]
        highest_n = scaled_nV.amax(-1)
        dist.all_reduce(highest_n, dist.ReduceOp.MAX, group=group)
        own_n = ids_n - self._first
        is_own_n = (own_n >= 0) & (own_n < scaled_nV.shape[1])
        chosen_n = scaled_nV.gather(-1, own_n.clamp(0, scaled_nV.shape[1] - 1)[:, None])[:, 0]
        shares_nV = (scaled_nV - highest_n[:, None]).exp()
        sums_3n = torch.stack(
            (
                shares_nV.sum(-1),
                torch.where(is_own_n, chosen_n, 0.0),
                torch.where(shares_nV > 0, shares_nV * scaled_nV, 0.0).sum(-1),
            )
        )
        dist.all_reduce(sums_3n, group=group)
        log_sum_n = sums_3n[0].log() + highest_n
        return sums_3n[1] - log_sum_n, log_sum_n - sums_3n[2] / sums_3n[0], log_sum_n

    def _gradient(
        self,
        logits_nV: Tensor,
        ids_n: Tensor,
        temperature_n: Tensor,
        log_sum_n: Tensor,
        gradient_n: Tensor,
    ) -> Tensor:
        """As `chunk_gradient`, of this rank's part of the logits."""
        shifted_n = ids_n - self._first
        return chunk_gradient(logits_nV, shifted_n, temperature_n, log_sum_n, gradient_n)

    def topped(
        self, logits_nV: Tensor, ids_n: Tensor, temperature_n: Tensor, top: int | Tensor
    ) -> tuple[Tensor, ...]:
        """As `token_scores.scored`, of this rank's part of the logits."""
        scaled_nV = logits_nV.float() / temperature_n[:, None]
        top_ids_nK = self._likeliest(scaled_nV.detach(), top) if isinstance(top, int) else top
        found = _Topped.apply(scaled_nV, ids_n, top_ids_nK, self)
        return *found, top_ids_nK

    def _likeliest(self, scaled_nV: Tensor, top: int) -> Tensor:
        """Ids of the likeliest tokens of all ranks, in falling order."""
        group = group_of("tensor_model_parallel")
        own = scaled_nV.topk(min(top, scaled_nV.shape[1]), -1)
        pair_2nk = torch.stack((own.values, (own.indices + self._first).float()))
        each = [torch.empty_like(pair_2nk) for _ in range(group.size())]
        dist.all_gather(each, pair_2nk, group=group)
        values_nk, ids_nk = torch.cat(each, -1)
        ids_nK: Tensor = ids_nk.gather(-1, values_nk.topk(top, -1).indices).long()
        return ids_nK

    def scores_at(
        self, scaled_nV: Tensor, ids_n: Tensor, top_ids_nK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probs, entropies, log-probs of other tokens, and the log-sums."""
        group, ones_n = group_of("tensor_model_parallel"), scaled_nV.new_ones(len(scaled_nV))
        logprobs_n, entropy_n, log_sum_n = self._scores(scaled_nV, ids_n, ones_n)
        at_nK, is_own_nK = self.own(top_ids_nK, scaled_nV.shape[1])
        top_nK = torch.where(is_own_nK, scaled_nV.gather(-1, at_nK), 0.0)
        dist.all_reduce(top_nK, group=group)
        return logprobs_n, entropy_n, top_nK - log_sum_n[:, None], log_sum_n

    def own(self, ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Places of tokens in this rank's part, and whether they lie there."""
        own = ids - self._first
        return own.clamp(0, size - 1), (own >= 0) & (own < size)


class _Topped(torch.autograd.Function):
    """Scores with those of other tokens; each rank has the gradient of its part."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        scaled_nV: Tensor,
        ids_n: Tensor,
        top_ids_nK: Tensor,
        head: SplitHead,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs_n, entropy_n, top_nK, log_sum_n = head.scores_at(scaled_nV, ids_n, top_ids_nK)
        ctx.save_for_backward(scaled_nV, ids_n, top_ids_nK, log_sum_n)
        ctx.head = head
        ctx.mark_non_differentiable(entropy_n)
        return logprobs_n, entropy_n, top_nK

    @staticmethod
    def backward(ctx: Any, gradient_n: Tensor, _entropy_n: Tensor, gradient_nK: Tensor) -> Any:  # noqa: ANN401
        scaled_nV, ids_n, top_ids_nK, log_sum_n = ctx.saved_tensors
        ids_nL = torch.cat((ids_n[:, None], top_ids_nK), -1)
        gradient_nL = torch.cat((gradient_n[:, None], gradient_nK), -1)
        at_nL, is_own_nL = ctx.head.own(ids_nL, scaled_nV.shape[1])
        chances_nV = (scaled_nV - log_sum_n[:, None]).exp()
        found_nV = chances_nV * -gradient_nL.sum(-1, keepdim=True)
        found_nV.scatter_add_(-1, at_nL, torch.where(is_own_nL, gradient_nL, 0.0))
        return found_nV, None, None, None


def group_of(name: str) -> Any:  # noqa: ANN401
    """A group of the library that this rank is in, by the library's name."""
    from megatron.core import parallel_state

    return getattr(parallel_state, f"get_{name}_group")()
