"""Context parallelism: ranks that compute the same rows, each a slice of their tokens.

Embedding, layers and head are computed by slice. Around attention the slices of all heads become
some heads of whole rows, and slices again (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509), so
positions, masks and documents are those of whole rows, the attention function is the same, and each
rank has as many pairs of tokens. To a compiler the exchange is one operation.
Scores of a slice are given to all: each rank has the loss of whole rows, and the gradient of its
slice alone; those of all ranks add up to the gradient. A trainer's start checks by measurement that
a family computes the same by slices as by whole rows.
Axes: `B` sequence, `T` token, `S` token of a slice, `N` chosen token, `h` head, `g` head of whole
rows, `D` of a head, `R` rank of the slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.model.base import REFUSALS, EngineError
from rlstreams.workers.model.bins import difference_of, score_padded
from rlstreams.workers.model.documents import Documents, attend
from rlstreams.workers.model.families import SDPA
from rlstreams.workers.model.folder import check_heads
from rlstreams.workers.model.routing import Counted, Routes, RoutingReplay
from rlstreams.workers.model.token_scores import Score, TokenScorer, TokenScores, places_of

ATTENTION = "context"  # its name among the library's implementations
_BY_LENGTH = {"dynamic", "longrope"}  # rotations that depend on the last position, so on the slice


class Peers(NamedTuple):
    """The ranks that have the slices of a row, as constants of a compiled layer."""

    group: str  # name of the process group
    size: int


class SlicedScores:
    """A `Score` of whole rows, of which this rank computes a slice; its peers call it together."""

    def __init__(self, scorer: TokenScorer, cp: int, asked_by: str = "trainer") -> None:
        """All ranks of the process group call it together; `cp` neighbours are peers.

        Args:
            asked_by: section of the configuration, for messages.

        Raises:
            ConfigError: a model whose attention cannot be shared so.
        """
        _check(scorer.model, cp, asked_by)
        self.asked_by = asked_by
        self._group = _peers(cp)
        self._scorer, self.model, self.vocab_size = scorer, scorer.model, scorer.vocab_size
        self.routing: RoutingReplay = _SlicedRouting(scorer.model, self._group)
        self.is_whole = True  # each rank computes whole rows, until `check_slices`

    def __call__(
        self,
        ids_BT: Tensor,
        real_BT: Tensor | None,
        chosen: Tensor,
        temperature_N: Tensor,
        documents: Documents | None = None,
        top: int | Tensor = 0,
    ) -> TokenScores:
        """See `TokenScorer`."""
        if self.is_whole:
            return self._scorer(ids_BT, real_BT, chosen, temperature_N, documents, top)
        size, rank, length = self._group.size(), self._group.rank(), ids_BT.shape[1]
        padded_BT = _padded(ids_BT, size)
        width = padded_BT.shape[1] // size
        whole = self._scorer.inputs(
            padded_BT,
            None if real_BT is None else _padded(real_BT, size),
            None if documents is None else documents.longer(width * size - length),
        )
        own = {name: _slice(whole[name], self._group) for name in ("input_ids", "position_ids")}
        chosen_N = places_of(chosen)
        before_N = chosen_N.cpu() - 1  # a token is scored where the one before it is
        row_N, column_N = before_N // length, before_N % length
        of_rank = [(column_N // width == r).nonzero()[:, 0] for r in range(size)]
        # All ranks score equally many tokens: gathered tensors have one shape, and no weight lacks
        # a gradient.
        most = max(1, *map(len, of_rank))
        mine = of_rank[rank]
        places = (row_N * width + column_N - rank * width)[mine].to(ids_BT.device)
        mine = mine.to(ids_BT.device)
        by_token = (places, 0), (ids_BT.flatten()[chosen_N[mine]], 0), (temperature_N[mine], 1)
        filled = [pad(values, (0, most - len(mine)), value=value) for values, value in by_token]
        tops = pad(top[mine], (0, 0, 0, most - len(mine))) if isinstance(top, Tensor) else top
        places, ids_N, temperature_N = filled
        inputs = whole | own | {"context": Peers(self._group.group_name, size)}
        scores = self._scorer.score(inputs, places, ids_N, temperature_N, tops)
        back_N = torch.empty_like(before_N)
        for r, theirs in enumerate(of_rank):
            back_N[theirs] = r * most + torch.arange(len(theirs))
        return _of_whole_rows(scores, back_N.to(ids_BT.device), self._group)


def _of_whole_rows(scores: TokenScores, back_N: Tensor, group: Any) -> TokenScores:  # noqa: ANN401
    """Scores of all ranks from those of this rank's slice: `back_N` has each token's place."""
    learnt = [t for t in (scores.logprobs_N, scores.entropy_N, scores.values_N) if t is not None]
    tops = [] if scores.top_NK is None else list(scores.top_NK.unbind(1))
    found_RCN = _Gathered.apply(torch.stack([*learnt, *tops]), group)
    found_CN = found_RCN.transpose(0, 1).flatten(1)[:, back_N]
    values_N = None if scores.values_N is None else found_CN[2]
    ids_NK = scores.top_ids_NK
    if ids_NK is not None:
        ids_RSK = _Gathered.apply(ids_NK, group)
        ids_NK = ids_RSK.flatten(0, 1)[back_N]
    top_NK = found_CN[len(learnt) :].T if tops else None
    return TokenScores(found_CN[0], found_CN[1].detach(), values_N, top_NK, ids_NK)


@torch.no_grad()
def check_slices(scorer: SlicedScores, root: Score, device: torch.device) -> None:
    """Compute by slices from now on, if they give the log-probs of whole rows.

    Args:
        root: the module that computes, by this scorer.

    Raises:
        ConfigError: they do not.
    """
    subject = f"{scorer.asked_by}.layout.cp is above 1, but a {type(scorer.model).__name__}"
    try:
        expected_N = score_padded(root, scorer.vocab_size, device)
        _use_slices(scorer.model)
        scorer.is_whole = False
        found_N = score_padded(root, scorer.vocab_size, device)
    except (*REFUSALS, EngineError) as err:
        raise ConfigError(f"{subject} cannot be computed by slices: {err}; set it to 1") from err
    dtype = next(scorer.model.parameters()).dtype
    if found := difference_of(found_N, expected_N, dtype):
        raise ConfigError(f"{subject} has log-probs {found} off in slices: set it to 1")


def _peers(cp: int) -> Any:  # noqa: ANN401
    """The group of this rank's neighbours, over the addresses of the group of all ranks."""
    world: Any = dist.group.WORLD
    is_gloo = dist.get_backend() == "gloo"
    options = world._get_backend(torch.device("cpu")).options if is_gloo else None
    return dist.new_subgroups(cp, pg_options=options)[0]


def _check(model: Any, cp: int, asked_by: str) -> None:  # noqa: ANN401  (an untyped library)
    config, subject = model.config.get_text_config(), f"{asked_by}.layout.cp is {cp}, but"
    check_heads(config.to_dict(), cp, asked_by)
    if (attention := model.config._attn_implementation) != SDPA:
        raise ConfigError(
            f"{subject} attention of a {config.model_type} is {attention}: set cp to 1"
        )
    kinds = [getattr(module, "rope_type", "") for module in model.modules()]
    every = {k for kind in kinds for k in (kind.values() if isinstance(kind, dict) else [kind])}
    if found := sorted(every & _BY_LENGTH):
        raise ConfigError(
            f"{subject} rope_type is {found[0]!r}, which a slice computes wrong: set cp to 1"
        )


def _use_slices(model: Any) -> None:  # noqa: ANN401
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    model.config._attn_implementation = ATTENTION


def _attention(
    module: nn.Module,
    query_BhSD: Tensor,
    key_BhSD: Tensor,
    value_BhSD: Tensor,
    attention_mask: Tensor | None,
    context: Peers | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """An attention function of the library, which compilers trace.

    Args:
        attention_mask: of whole rows, as are the documents in `kwargs`.
        context: the ranks that have the slices; None: rows are whole here.
    """
    if context is None:
        return attend(module, query_BhSD, key_BhSD, value_BhSD, attention_mask, **kwargs)
    if (times := context.size // key_BhSD.shape[1]) > 1:  # ranks need the same heads of keys
        key_BhSD, value_BhSD = (t.repeat_interleave(times, 1) for t in (key_BhSD, value_BhSD))
    query, key, value = _to_heads(context, query_BhSD, key_BhSD, value_BhSD)
    own: Any = module
    if times > 1 and kwargs.get("document_starts") is None:  # documents count the heads they get
        own = SimpleNamespace(
            is_causal=getattr(module, "is_causal", True),
            num_key_value_groups=query.shape[1] // key.shape[1],
        )
    found_BTgD, _ = attend(own, query, key, value, attention_mask, **kwargs)
    return _to_slices(context, found_BTgD), None


def _to_heads(peers: Peers, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Some heads of whole rows (B, g, T, D), from slices of all heads (B, h, S, D); one exchange
    for all tensors, whose dtype is one."""
    (batch, _, length, _), ranks = tensors[0].shape, peers.size
    # (R, B, S, g * D): what comes from rank r is slice r of the row.
    parts = [
        t.reshape(batch, ranks, -1, length, t.shape[3]).permute(1, 0, 3, 2, 4).flatten(3)
        for t in tensors
    ]
    taken_RBSg: Tensor = _exchange(torch.cat(parts, 3), peers.group)
    rows_BTg = taken_RBSg.transpose(0, 1).flatten(1, 2)
    columns = torch.split(rows_BTg, [part.shape[3] for part in parts], 2)
    pairs = zip(columns, tensors, strict=True)
    return tuple(
        own.reshape(batch, ranks * length, -1, t.shape[3]).transpose(1, 2) for own, t in pairs
    )


def _to_slices(peers: Peers, found_BTgD: Tensor) -> Tensor:
    """Slices of all heads (B, S, h, D), from some heads of whole rows."""
    batch, _, heads, width = found_BTgD.shape
    sent_RBSgD = found_BTgD.reshape(batch, peers.size, -1, heads, width).transpose(0, 1)
    taken_RBSgD: Tensor = _exchange(sent_RBSgD.contiguous(), peers.group)
    return taken_RBSgD.permute(1, 2, 0, 3, 4).flatten(2, 3)


@torch.library.custom_op("rlstreams::exchange", mutates_args=())
def _exchange(sent_R: Tensor, group: str) -> Tensor:
    """Entry r of `sent_R` goes to rank r of the group; entry r of the result comes from it."""
    taken_R = sent_R.new_empty(sent_R.shape)
    if _is_apart:
        return taken_R.copy_(sent_R)
    sent, taken = (t.contiguous().view(torch.uint8) for t in (sent_R, taken_R))
    named: Any = dist.distributed_c10d
    dist.all_to_all_single(taken, sent, group=named._resolve_process_group(group))
    return taken_R


@_exchange.register_fake
def _(sent_R: Tensor, group: str) -> Tensor:
    del group
    return sent_R.new_empty(sent_R.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:  # noqa: ANN401
    del output
    ctx.group = inputs[1]


def _backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
    return _exchange(gradient_R.contiguous(), ctx.group), None


_exchange.register_autograd(_backward, setup_context=_keep)
_is_apart = False  # in this process


@contextmanager
def apart() -> Iterator[None]:
    """Compute without the peers: nothing is exchanged, so only shapes are right."""
    global _is_apart  # noqa: PLW0603
    _is_apart = True
    try:
        yield
    finally:
        _is_apart = False


class _Gathered(torch.autograd.Function):
    """Values of all ranks, (R, ...); all compute alike, so each keeps its own gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:  # noqa: ANN401
        ctx.rank = group.rank()
        found = own.new_empty(group.size() * own.numel())
        dist.all_gather_into_tensor(found, own.flatten(), group=group)
        return found.view(group.size(), *own.shape)

    @staticmethod
    def backward(ctx: Any, gradient_R: Tensor) -> Any:  # noqa: ANN401
        return gradient_R[ctx.rank], None


class _SlicedRouting(RoutingReplay):
    """Routers that see a slice; routes are those of whole rows, and flips count whole rows."""

    def __init__(self, model: nn.Module, group: Any) -> None:  # noqa: ANN401
        super().__init__(model)
        self._group = group

    @contextmanager
    def replaying(self, routes: Routes | None) -> Iterator[Counted]:
        """See `RoutingReplay`."""
        if routes is None:
            yield Counted()
            return
        size = self._group.size()
        own = Routes(*(_slice(_padded(values_BT, size), self._group) for values_BT in routes))
        with super().replaying(own) as counted:
            yield counted
        total = torch.tensor(counted.num_flips, device=own.recorded_BT.device)
        dist.all_reduce(total, group=self._group)
        counted.clear()
        counted[0] = total


def _padded(values_BT: Tensor, size: int) -> Tensor:
    """Pad with zeros behind T, to slices of one width."""
    more = -values_BT.shape[1] % size
    zeros_BT = values_BT.new_zeros(len(values_BT), more, *values_BT.shape[2:])
    return torch.cat([values_BT, zeros_BT], 1)


def _slice(values_BT: Tensor, group: Any) -> Tensor:  # noqa: ANN401
    own_BS: Tensor = values_BT.chunk(group.size(), 1)[group.rank()]
    return own_BS
