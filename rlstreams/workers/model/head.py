"""Output head over chosen tokens: log-prob, entropy and gradients, a chunk of rows at a time.

One pass over a chunk's logits gives log-prob and entropy; its backward makes the gradient of the
same logits, held or computed again, and sums the head's own gradient in float32. [N, V] in float32
never exists whole. For heads that are one matrix; others go through the library
(`token_scores.py`).
Axes: `N` chosen token, `n` row of a chunk, `H` hidden, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def chunk_scores(
    logits_nV: Tensor, ids_n: Tensor, temperature_n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob and entropy of softmax(logits / temperature), and its log-sum; float32, nats."""
    scaled_nV = logits_nV.float() / temperature_n[:, None]
    log_sum_n = torch.logsumexp(scaled_nV, -1)
    logprobs_nV = scaled_nV - log_sum_n[:, None]
    chances_nV = logprobs_nV.exp()
    # At probability 0 the term is 0, where p log p would be NaN.
    entropy_n = -torch.where(chances_nV > 0, chances_nV * logprobs_nV, 0.0).sum(-1)
    return logprobs_nV.gather(-1, ids_n[:, None])[:, 0], entropy_n, log_sum_n


def chunk_gradient(
    logits_nV: Tensor, ids_n: Tensor, temperature_n: Tensor, log_sum_n: Tensor, gradient_n: Tensor
) -> Tensor:
    """Gradient of the logits, in their dtype, from that of the log-probs."""
    chances_nV = (logits_nV.float() / temperature_n[:, None] - log_sum_n[:, None]).exp()
    tokens_V = torch.arange(logits_nV.shape[1], device=ids_n.device)
    taken_nV = (tokens_V == ids_n[:, None]).float()
    found_nV = (taken_nV - chances_nV) * (gradient_n / temperature_n)[:, None]
    return found_nV.to(logits_nV.dtype)


class Head:
    """Scorer of hidden states by an output head that is one matrix.

    Args:
        rows: of a chunk.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.holds_logits = False
        """Keep all logits for the backward, instead of computing those of several chunks again."""
        self.scores: Function = chunk_scores
        self.gradient: Function = chunk_gradient

    def __call__(
        self, hidden_NH: Tensor, weight_VH: Tensor, ids_N: Tensor, temperature_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probs, with gradient, and entropy, without; float32 (N,), nats."""
        scores: tuple[Tensor, Tensor] = _Scored.apply(
            hidden_NH, weight_VH, ids_N, temperature_N, self
        )
        return scores

    def chunks(self, num: int) -> list[slice]:
        """Rows of each chunk."""
        return [slice(at, min(at + self.rows, num)) for at in range(0, num, self.rows)]

    def logits(self, hidden_nH: Tensor, weight_VH: Tensor) -> Tensor:
        """Logits in the model's dtype. Compiled functions take chunks of one number of rows: rows
        beyond the given ones hold unused values.
        """
        num = len(hidden_nH)
        if not self.is_compiled or num == self.rows:
            return hidden_nH @ weight_VH.T
        whole_nV = hidden_nH.new_empty(self.rows, len(weight_VH))
        torch.mm(hidden_nH, weight_VH.T, out=whole_nV[:num])
        return whole_nV

    @property
    def is_compiled(self) -> bool:
        """Whether its element-wise functions are compiled."""
        return self.scores is not chunk_scores

    def filled(self, *values_n: Tensor) -> list[Tensor]:
        """Values by row, up to the number of rows that compiled functions take."""
        missing = self.rows - len(values_n[0]) if self.is_compiled else 0
        if not missing:
            return list(values_n)
        return [torch.nn.functional.pad(values, (0, missing), value=1) for values in values_n]


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  (torch's own signature)
        hidden_NH: Tensor,
        weight_VH: Tensor,
        ids_N: Tensor,
        temperature_N: Tensor,
        head: Head,
    ) -> tuple[Tensor, Tensor]:
        scores_3N = hidden_NH.new_empty(3, len(ids_N), dtype=torch.float32)
        held: list[Tensor] = []
        is_held = head.holds_logits or len(ids_N) <= head.rows
        is_held = is_held and any(ctx.needs_input_grad[:2])
        for rows in head.chunks(len(ids_N)):
            logits_nV = head.logits(hidden_NH[rows], weight_VH)
            found = head.scores(logits_nV, *head.filled(ids_N[rows], temperature_N[rows]))
            for values_N, values_n in zip(scores_3N, found, strict=True):
                values_N[rows] = values_n[: rows.stop - rows.start]
            if is_held:
                held.append(logits_nV)
        logprobs_N, entropy_N, log_sum_N = (values_N.clone() for values_N in scores_3N)
        ctx.head, ctx.held = head, held
        ctx.save_for_backward(hidden_NH, weight_VH, ids_N, temperature_N, log_sum_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor, _entropy_N: Tensor) -> Any:  # noqa: ANN401
        hidden_NH, weight_VH, ids_N, temperature_N, log_sum_N = ctx.saved_tensors
        head: Head = ctx.head
        hidden_gradient_NH = torch.empty_like(hidden_NH)
        weight_gradient_VH = None
        for index, rows in enumerate(head.chunks(len(ids_N))):
            hidden_nH = hidden_NH[rows]
            logits_nV = ctx.held[index] if ctx.held else head.logits(hidden_nH, weight_VH)
            by_row = [values_N[rows] for values_N in (ids_N, temperature_N, log_sum_N, gradient_N)]
            found_nV = head.gradient(logits_nV, *head.filled(*by_row))[: len(hidden_nH)]
            if ctx.held:
                ctx.held[index] = logits_nV = None
            hidden_gradient_NH[rows] = found_nV @ weight_VH
            if ctx.needs_input_grad[1]:
                weight_gradient_VH = _added(weight_gradient_VH, found_nV, hidden_nH)
        if weight_gradient_VH is not None:
            weight_gradient_VH = weight_gradient_VH.to(weight_VH.dtype)
        return hidden_gradient_NH, weight_gradient_VH, None, None, None


def _added(total_VH: Tensor | None, gradient_nV: Tensor, hidden_nH: Tensor) -> Tensor:
    """`total` and this chunk's share of the head's gradient, in float32."""
    if not gradient_nV.is_cuda or gradient_nV.dtype == torch.float32:
        share_VH = gradient_nV.T.float() @ hidden_nH.float()
        return share_VH if total_VH is None else total_VH.add_(share_VH)
    if total_VH is None:
        return torch.mm(gradient_nV.T, hidden_nH, out_dtype=torch.float32)
    return torch.addmm(total_VH, gradient_nV.T, hidden_nH, out_dtype=torch.float32)
