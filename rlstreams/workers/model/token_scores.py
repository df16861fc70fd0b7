"""Log-probs of chosen tokens, without the logits of all; for trainer and log-prob worker.

The output head is applied to the requested rows, a chunk at a time. A head that is a matrix is
computed here (`head.py`); soft caps and scales are the library's own: the model's forward, with a
stand-in for its body. A measurement at load shows which of the two gives the logits of the whole
forward; a family where neither does keeps the whole forward.
Axes: `B` sequence, `T` token, `N` chosen token, `H` hidden, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlstreams.workers.model.attention import Mask
from rlstreams.workers.model.base import LOGITS_BYTES, REFUSALS
from rlstreams.workers.model.documents import Documents
from rlstreams.workers.model.head import Head
from rlstreams.workers.model.one_order import computed_again
from rlstreams.workers.model.routing import RoutingReplay

HEAD_TOLERANCE = {torch.float32: 1e-3}  # of a logit: a head of another kind is off by far more
HEAD_TOLERANCE_LOW = 0.25  # the same in 16 bits
_PROBE = ((3, 5, 7, 4, 6), (6, 4, 2, 2, 5))

MakeMask = Callable[[Tensor], Mask | None]


class TokenScores(NamedTuple):
    """A model's scores of given tokens; None: not asked for."""

    logprobs_N: Tensor  # float32, nats
    entropy_N: Tensor  # float32, no gradient
    values_N: Tensor | None = None  # float32, of the states before the tokens, by a value head
    top_NK: Tensor | None = None  # float32, nats: of other tokens, asked for or the likeliest
    top_ids_NK: Tensor | None = None  # int64; the likeliest are in falling order

    def at(self, places_N: Tensor | None) -> TokenScores:
        """Scores of the tokens at these places of its own; None: of all."""
        if places_N is None:
            return self
        return TokenScores._make(None if t is None else t[places_N] for t in self)


class ValueHead(nn.Module):
    """Value of a state: w h + b of its last hidden state h, in float32; 0 at first."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """Values, (N,)."""
        return hidden_NH.float() @ self.weight + self.bias


def score_tokens(logits_NV: Tensor, token_ids_N: Tensor, temperature_N: Tensor) -> TokenScores:
    """Log-probs and entropy of softmax(logits / temperature), in float32."""
    scaled_NV = logits_NV.float() / temperature_N[:, None]
    logprobs_NV = torch.log_softmax(scaled_NV, dim=-1)
    with torch.no_grad():
        # entr is 0 at probability 0, where p log p would be NaN.
        entropy_N = torch.special.entr(logprobs_NV.exp()).sum(-1)
    return TokenScores(logprobs_NV.gather(-1, token_ids_N[:, None]).squeeze(-1), entropy_N)


def scored(
    logits_NV: Tensor, token_ids_N: Tensor, temperature_N: Tensor, top: int | Tensor
) -> tuple[Tensor, ...]:
    """`score_tokens`, then log-probs and ids of other tokens, if asked for."""
    scores = score_tokens(logits_NV, token_ids_N, temperature_N)
    if isinstance(top, int) and not top:
        return scores[:2]
    scaled_NV = logits_NV.float() / temperature_N[:, None]
    ids_NK = scaled_NV.topk(top, -1).indices if isinstance(top, int) else top
    top_NK = scaled_NV.gather(-1, ids_NK) - scaled_NV.logsumexp(-1, keepdim=True)
    return (*scores[:2], top_NK, ids_NK)


def scores_of(found: Sequence[Tensor]) -> TokenScores:
    """Log-probs and entropy; with two more columns those of other tokens."""
    logprobs_N, entropy_N, *tops = found
    return TokenScores(logprobs_N, entropy_N, None, *tops)


def in_chunks(
    score: Callable[..., tuple[Tensor, ...]], rows: int, *by_row: Tensor
) -> tuple[Tensor, ...]:
    """Result of `score`, computed by so many rows at a time, and once more in a backward."""
    if len(by_row[0]) <= rows:
        return score(*by_row)
    parts = [
        # No random numbers are drawn: there is no state of a generator to keep.
        checkpoint(
            score,
            *chunk,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=computed_again,
        )
        for chunk in zip(*(torch.split(t, rows) for t in by_row), strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def places_of(chosen: Tensor) -> Tensor:
    """Places of chosen tokens in B x T, (N,), from places or a mask."""
    return chosen.flatten().nonzero()[:, 0] if chosen.dtype == torch.bool else chosen


class Score(Protocol):
    """A `TokenScorer`, or a stand-in for one."""

    @property
    def routing(self) -> RoutingReplay:
        """The model's routers."""

    def __call__(
        self,
        ids_BT: Tensor,
        real_BT: Tensor | None,
        chosen: Tensor,
        temperature_N: Tensor,
        documents: Documents | None = None,
        top: int | Tensor = 0,
        /,
    ) -> TokenScores:
        """See `TokenScorer`."""


class TokenScorer:
    """A model as a function from tokens to the log-probs of some. One thread calls it at a time.

    Args:
        model: called with `input_ids` (B, T), `attention_mask`, `position_ids` (B, T) and
            `use_cache`; answers with `.logits` (B, T, V).
        mask: of the real tokens, (B, T) bool, padded at the end.
        chunk_bytes: bound of one chunk's logits in float32, a row at least; a backward holds about
            five arrays of that size.

    `head` scores the rows of a head that is one matrix. With a `value_head`, which only a model
    that `gives_states` may have, there are values too.
    """

    def __init__(
        self, model: nn.Module, mask: MakeMask, *, chunk_bytes: int = LOGITS_BYTES
    ) -> None:
        self.model = model
        self.routing = RoutingReplay(model)
        self._mask = mask
        self.value_head: ValueHead | None = None
        self.head = Head(max(1, chunk_bytes // (4 * self.vocab_size)))
        self._is_plain = False
        self._body = self._find_body()

    def __call__(
        self,
        ids_BT: Tensor,
        real_BT: Tensor | None,
        chosen: Tensor,
        temperature_N: Tensor,
        documents: Documents | None = None,
        top: int | Tensor = 0,
    ) -> TokenScores:
        """Scores of the chosen tokens, row by row; with gradient where it is enabled.

        Args:
            ids_BT: int64.
            real_BT: bool, False is padding at the end of a row; None: rows are `documents`.
            chosen: (B, T) bool, or int64 places (N,) in B x T, of a token that several documents
                have also several times; never the first token of a row or a document, which
                nothing predicts.
            temperature_N: of the chosen tokens, row by row.
            documents: those of the one row, if `real_BT` is None (`documents.use_documents`).
            top: number of likeliest tokens, or ids (N, K), to score as well.
        """
        chosen_N = places_of(chosen)
        inputs = self.inputs(ids_BT, real_BT, documents)
        # A token's logits predict the next.
        before_N = chosen_N - 1 if documents is None else documents.before(chosen_N)
        return self.score(inputs, before_N, ids_BT.flatten()[chosen_N], temperature_N, top)

    def inputs(
        self, ids_BT: Tensor, real_BT: Tensor | None, documents: Documents | None
    ) -> dict[str, Any]:
        """The model's keyword arguments, for the same arguments."""
        if real_BT is not None:
            return self._padded(ids_BT, real_BT)
        assert documents is not None, "a row is padded, or of documents"
        return {"input_ids": ids_BT, "use_cache": False, **documents.inputs()}

    def score(
        self,
        inputs: dict[str, Any],
        before_N: Tensor,
        ids_N: Tensor,
        temperature_N: Tensor,
        top: int | Tensor = 0,
    ) -> TokenScores:
        """Scores of tokens, each predicted at its place in B x T of the inputs."""
        if self._body is None:
            logits_NV = self.model(**inputs).logits.flatten(0, 1)[before_N]
            return scores_of(scored(logits_NV, ids_N, temperature_N, top))
        output = self._body(**inputs)
        hidden_NH = _Rows.apply(output.last_hidden_state.flatten(0, 1), before_N)
        scores = self._headed(type(output), hidden_NH, ids_N, temperature_N, top)
        if self.value_head is None:
            return scores
        return scores._replace(values_N=self.value_head(hidden_NH))

    @property
    def gives_states(self) -> bool:
        """Whether the last hidden states can be separated from the head."""
        return self._body is not None

    def _headed(
        self,
        output: type[Any],
        hidden_NH: Tensor,
        ids_N: Tensor,
        temperature_N: Tensor,
        top: int | Tensor,
    ) -> TokenScores:
        """Scores from last hidden states, by the head."""
        assert self._body is not None, "without it there are none"
        if self._is_plain and isinstance(top, int) and not top:
            return TokenScores(*self.head(hidden_NH, self._matrix(), ids_N, temperature_N))
        head = self._head_of(self._body, output)

        def score(
            rows_nH: Tensor, ids_n: Tensor, temperature_n: Tensor, *top_ids_nK: Tensor
        ) -> tuple[Tensor, ...]:
            return scored(head(rows_nH), ids_n, temperature_n, *(top_ids_nK or [top]))

        tops = [top] if isinstance(top, Tensor) else []
        return scores_of(in_chunks(score, self.head.rows, hidden_NH, ids_N, temperature_N, *tops))

    def _padded(self, ids_BT: Tensor, real_BT: Tensor) -> dict[str, Any]:
        # Padding counts on: positions that stand still would look like packed sequences.
        positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        return {
            "input_ids": ids_BT,
            "attention_mask": self._mask(real_BT),
            "position_ids": positions_BT,
            "use_cache": False,
        }

    def _matrix(self) -> Tensor:
        model: Any = self.model
        weight: Tensor = model.get_output_embeddings().weight
        return weight

    def _head_of(self, body: nn.Module, output: type[Any]) -> Callable[[Tensor], Tensor]:
        """The library's head: the whole forward, with `body` returning the given hidden states."""

        def head(hidden_NH: Tensor) -> Tensor:
            ids_1N = torch.zeros(1, len(hidden_NH), dtype=torch.int64, device=hidden_NH.device)
            with _answering(body, output(last_hidden_state=hidden_NH[None])):
                logits_1NV: Tensor = self.model(input_ids=ids_1N, use_cache=False).logits
            return logits_1NV[0]

        return head

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        config = getattr(self.model, "config", None)
        return int(config.get_text_config().vocab_size) if config is not None else 1

    @torch.no_grad()
    def _find_body(self) -> nn.Module | None:
        """The part below the head, if head and body by themselves give the forward's logits."""
        if not hasattr(self.model, "get_decoder"):
            return None  # no model of the library
        device = next(self.model.parameters()).device
        ids_BT = torch.tensor(_PROBE, device=device) % self.vocab_size
        inputs = self._padded(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool))
        expected_BTV = self.model(**inputs).logits
        tolerance = HEAD_TOLERANCE.get(expected_BTV.dtype, HEAD_TOLERANCE_LOW)
        model: Any = self.model
        bodies: tuple[nn.Module, ...] = (model.base_model, model.get_decoder())
        for body in dict.fromkeys(bodies):
            try:
                output = body(**inputs)
                # In another order: shows a head that looks at neighbours.
                turned_NH = output.last_hidden_state.flatten(0, 1).flip(0)
                found_NV = self._head_of(body, type(output))(turned_NH).flip(0)
            except REFUSALS:
                continue
            expected_NV = expected_BTV.flatten(0, 1)
            if _is_alike(found_NV, expected_NV, tolerance):
                self._is_plain = self._is_matrix(turned_NH.flip(0), expected_NV, tolerance)
                return body
        return None

    def _is_matrix(self, hidden_NH: Tensor, expected_NV: Tensor, tolerance: float) -> bool:
        """Whether the head is one matrix, without caps, scales or adapters."""
        model: Any = self.model
        if type(model.get_output_embeddings()) is not nn.Linear:
            return False
        return _is_alike(hidden_NH @ self._matrix().T, expected_NV, tolerance)


class _Rows(torch.autograd.Function):
    """Some rows, some of them several times: their gradient is a sum in float32."""

    @staticmethod
    def forward(ctx: Any, values_TH: Tensor, places_N: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(places_N)
        ctx.like = torch.empty_like(values_TH, device="meta")
        return values_TH[places_N]

    @staticmethod
    def backward(ctx: Any, gradient_NH: Tensor) -> Any:  # noqa: ANN401
        (places_N,) = ctx.saved_tensors
        dtype = torch.promote_types(gradient_NH.dtype, torch.float32)
        total_TH = torch.zeros(ctx.like.shape, dtype=dtype, device=gradient_NH.device)
        total_TH.index_put_((places_N,), gradient_NH.to(dtype), accumulate=True)
        return total_TH.to(ctx.like.dtype), None


def _is_alike(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether tensors are equal up to the tolerance and two roundings: in bfloat16 one rounding of
    a logit of 67 is 0.5."""
    if found.shape != expected.shape:
        return False
    rounding = 2 * torch.finfo(expected.dtype).eps * expected.float().abs()
    return bool(((found.float() - expected.float()).abs() <= tolerance + rounding).all())


@contextmanager
def _answering(body: nn.Module, answer: object) -> Iterator[None]:
    """Have `body` compute nothing and return this answer."""
    body.forward = lambda *_args, **_kwargs: answer
    try:
        yield
    finally:
        del body.forward  # the class's own is seen again
