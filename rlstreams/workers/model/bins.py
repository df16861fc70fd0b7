"""Whether a model takes rows of documents, and whether its layers compile: measured at a start.

A family may keep states, sinks or caps, a kernel may refuse a head's width, a compiler may fail. So
a few documents are scored in one row and one by one, and each layer is run uncompiled and compiled,
on a bin of the size that steps have. Parts that differ or fail stay as before, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.base import CPU, REFUSALS, EngineError
from rlstreams.workers.model.cut import bin_sizes
from rlstreams.workers.model.documents import Documents, use_documents
from rlstreams.workers.model.families import SDPA
from rlstreams.workers.model.head import chunk_gradient, chunk_scores
from rlstreams.workers.model.layers import (
    ALONE,
    NOTHING_KEPT,
    KeptFault,
    LayerTrial,
    NotCompiledError,
    TryingRanks,
    configure_compiler,
    marked_layers,
)
from rlstreams.workers.model.model import right_padded
from rlstreams.workers.model.prefixes import NOTHING_TAKEN, Taken
from rlstreams.workers.model.reach import difference_of_reach
from rlstreams.workers.model.token_scores import Score, TokenScorer

TOLERANCE = 1e-3  # nats, float32
TOLERANCE_LOW = 0.2  # the same in 16 bits, of the largest difference
# Of the largest log-prob in 16 bits: Gemma 3 has logits of 129, bfloat16's next number is 130.
_ROUNDINGS = 4.0
# Mean difference of neighbours in 16 bits: a mistake is in many of them, a rounding stands alone.
RUN_TOLERANCE_LOW = 0.12
_RUN = 24  # neighbours
LARGER_CHUNK = 8  # compiled, a chunk's logits stay in 16 bits
_LENGTHS = (5, 70, 2, 33)
_TAKEN = (NOTHING_TAKEN, Taken(0, 3), NOTHING_TAKEN, Taken(1, 30))
_BEFORE, _BEYOND = 40, 30  # tokens: of a document before the one whose window is tried; beyond it
_WIDEST = 4096  # tokens: a wider window is not tried
_TAKEN_BEFORE = (NOTHING_TAKEN, Taken(0, 30))

EAGER_IF_PADDED = "rows are padded, to lengths of many kinds"


class Reasons(NamedTuple):
    """Reasons that a model computes the slower way; "": it does not."""

    why_padded: str  # for padded rows
    why_eager: str  # for layers that are not compiled
    why_unshared: str  # for tokens that sequences share, but a bin repeats


def use_bins(
    scorer: TokenScorer,
    device: str,
    bin_tokens: int,
    *,
    learns: bool = True,
    shares: bool = True,
    root: Score | None = None,
    ranks: TryingRanks = ALONE,
    fault: KeptFault = NOTHING_KEPT,
) -> Reasons:
    """Call `take_documents` and, if the model takes them, `why_unshared` and `compile_for_bins`.

    Args:
        shares: whether documents should have tokens in common, if they can.
    """
    if why_padded := take_documents(scorer, device, root):
        return Reasons(why_padded, EAGER_IF_PADDED, "rows are padded")
    unshared = why_unshared(scorer, root)
    shares = shares and not unshared
    why_eager = compile_for_bins(
        scorer, bin_tokens, learns=learns, shares=shares, root=root, ranks=ranks, fault=fault
    )
    return Reasons("", why_eager, unshared)


def take_documents(scorer: TokenScorer, device: str, root: Score | None = None) -> str:
    """Let a scorer's model take documents; the reason that it cannot, or "".

    Args:
        device: of the model and of the steps.
        root: of a sharded model, the module that all ranks call together.
    """
    if device == CPU:
        return "a CPU computes padded rows"
    model: Any = scorer.model
    config: Any = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if before != SDPA:
        return f"its attention is {before}, and documents have no such kernel"
    use_documents(model)
    try:
        _try_kernel(model, device)
        found = _difference(root or scorer, scorer)
        reach = _difference_of_reach(root or scorer, scorer)
    except (*REFUSALS, EngineError) as err:
        reason = f"{type(err).__name__}: {str(err)[:200]}"
    else:
        reason = f"of documents in one row: {reach}" if reach else ""
        if found:
            reason = f"log-probs of documents in one row are {found} off those of padded rows"
        if not reason:
            return ""
    config._attn_implementation = before
    return reason


def why_unshared(scorer: TokenScorer, root: Score | None = None) -> str:
    """Reason that documents of this model cannot have tokens in common; "": they can."""
    try:
        found = _difference(root or scorer, scorer, _TAKEN)
        reach = _difference_of_reach(root or scorer, scorer, _TAKEN_BEFORE)
    except REFUSALS as err:
        return f"{type(err).__name__}: {str(err)[:200]}"
    if found:
        return f"log-probs of documents that share tokens are {found} off"
    return reach and f"of documents that share tokens: {reach}"


def _try_kernel(model: Any, device: str) -> None:  # noqa: ANN401
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query = torch.ones(8, 2, width, dtype=_dtype(model), device=device)
    documents = Documents.of([3, 5], 8).to(device)
    torch.ops.rlstreams.attend(query, query, query, documents.starts, documents.extent, 1.0, -1)


def compile_for_bins(
    scorer: TokenScorer,
    bin_tokens: int,
    *,
    learns: bool = True,
    shares: bool = False,
    root: Score | None = None,
    ranks: TryingRanks = ALONE,
    fault: KeptFault = NOTHING_KEPT,
) -> str:
    """Compile layers and the head's functions for rows of that size; the reason against it, or "".

    Args:
        learns: there will be backwards, and the learnt weights have `requires_grad` already. Else
            forwards alone, in inference mode, and all `bin_sizes` are compiled now: no window has
            to wait for a compiler.
        shares: whether documents have tokens in common.
        root: as for `take_documents`.
        ranks: all have compiled layers, or none.
        fault: that fused layers differ, where an earlier start found it: they are not tried again.
    """
    layers = marked_layers(scorer.model)
    if not layers:
        return "it has no layer that its library marks as one"
    if scorer.routing.num_layers:
        return "it has experts, of which each bin calls others"
    plain = [layer.forward for layer in layers]
    why: str = max(ranks.gathered(fault.known()))  # of any rank: all do the same
    tried = partial(_try_compiled, scorer, root or scorer, bin_tokens, learns, shares)
    for fuses in (False,) if why else (True, False):
        configure_compiler(fuses)
        trial = LayerTrial(layers, plain, learns, ranks)
        try:
            ranks.agree(partial(tried, trial))
        except NotCompiledError as err:
            for layer, forward in zip(layers, plain, strict=True):
                layer.forward = forward
            why = str(err)
            if not err.is_difference:
                return why
            if fuses:
                fault.keep(why)
        else:
            torch._dynamo.config.suppress_errors = True  # another shape that fails is not compiled
            return ""
    return why


def _try_compiled(
    scorer: TokenScorer,
    score: Score,
    bin_tokens: int,
    learns: bool,
    shares: bool,
    trial: LayerTrial,
) -> None:
    """Compile, run and compare; leaves the layers compiled."""
    for size in bin_sizes(bin_tokens):  # a size is compiled for itself, and may fail alone
        with trial.checked(size), torch.inference_mode(not learns), torch.no_grad():
            _score(score, scorer, *_thirds(size, shares))
    trial.ranks.agree(partial(_compile_head, scorer, bin_tokens, learns))
    with torch.inference_mode():
        for size in () if learns else bin_sizes(bin_tokens):
            _score(score, scorer, *_thirds(size, shares))


def _compile_head(scorer: TokenScorer, bin_tokens: int, learns: bool) -> None:
    head, model = scorer.head, scorer.model
    rows = min(head.rows * LARGER_CHUNK, bin_tokens)
    device = next(model.parameters()).device
    logits_nV = torch.zeros(rows, scorer.vocab_size, dtype=_dtype(model), device=device)
    ids_n = torch.zeros(rows, dtype=torch.int64, device=device)
    ones_n = torch.ones(rows, device=device)
    scores = torch.compile(chunk_scores, dynamic=False, fullgraph=True)
    gradient = torch.compile(chunk_gradient, dynamic=False, fullgraph=True)
    with torch.inference_mode(not learns), torch.no_grad():
        *_, log_sum_n = scores(logits_nV, ids_n, ones_n)
        if learns:
            gradient(logits_nV, ids_n, ones_n, log_sum_n, ones_n.clone())
    head.rows, head.scores, head.gradient = rows, scores, gradient


@torch.no_grad()
def _difference(score: Score, scorer: TokenScorer, taken: Sequence[Taken] | None = None) -> str:
    """By how much log-probs of documents differ from those of padded rows; "": by rounding."""
    device = next(scorer.model.parameters()).device
    padded_N = score_padded(score, scorer.vocab_size, device)
    found_N = _score(score, scorer, _LENGTHS, sum(_LENGTHS) + 9, taken)
    return difference_of(found_N, padded_N, _dtype(scorer.model))


@torch.no_grad()
def _difference_of_reach(
    score: Score, scorer: TokenScorer, taken: Sequence[Taken] | None = None
) -> str:
    """A layer with another window in documents than in padded rows; "": none, or no window.

    Args:
        taken: tokens that the document before, and the one whose window is tried, take over.
    """
    windows = [w for w in attention_of(scorer.model).windows.values() if w is not None]
    if not windows or min(windows) > _WIDEST:
        return ""
    length, device = min(windows) + _BEYOND, next(scorer.model.parameters()).device
    lengths = [_BEFORE, length]
    documents = Documents.of(lengths, sum(lengths) + 9, taken)
    places_N = torch.from_numpy(documents.places(sum(lengths)))[_BEFORE:]
    return difference_of_reach(
        lambda: score_padded(score, scorer.vocab_size, device, [length]),
        lambda: _score(score, scorer, lengths, sum(lengths) + 9, taken),
        places_N,
    )


def difference_of(found_N: Tensor, expected_N: Tensor, dtype: torch.dtype) -> str:
    """By how much log-probs that were computed in two ways differ; "": by no more than rounding.

    In 16 bits the bound of a token follows the size of the log-probs, for a rounding is a share of
    a logit. The mean of `_RUN` neighbours has a tighter one: roundings stand alone, mistakes not.
    """
    off_N = (found_N - expected_N).abs()
    runs_N = off_N.unfold(0, min(_RUN, len(off_N)), 1).mean(-1)
    most, run = float(off_N.max()), float(runs_N.max())
    if dtype == torch.float32:
        is_alike = most <= TOLERANCE
    else:
        rounding = _ROUNDINGS * torch.finfo(dtype).eps * float(expected_N.abs().max())
        is_alike = most <= max(TOLERANCE_LOW, rounding) and run <= RUN_TOLERANCE_LOW
    return "" if is_alike else f"{most:.2g} nats ({run:.2g} in a row)"  # NaN is not alike


def score_padded(
    score: Score, vocab_size: int, device: torch.device, lengths: Sequence[int] = _LENGTHS
) -> Tensor:
    """Log-probs of made-up sequences in padded rows, all but their first tokens."""
    sequences = _sequences(lengths, vocab_size, _TAKEN[: len(lengths)])
    ids_BT, real_BT = (t.to(device) for t in right_padded(sequences, 0))
    chosen_BT = real_BT.clone()
    chosen_BT[:, 0] = False
    ones_N = torch.ones(sum(lengths) - len(lengths), device=device)
    return score(ids_BT, real_BT, chosen_BT, ones_N).logprobs_N


def _score(
    score: Score,
    scorer: TokenScorer,
    lengths: Sequence[int],
    num_tokens: int,
    taken: Sequence[Taken] | None = None,
) -> Tensor:
    """Log-probs of made-up documents in one row, all but their first tokens."""
    documents = Documents.of(lengths, num_tokens, taken)
    sequences = _sequences(lengths, scorer.vocab_size, taken or _TAKEN[: len(lengths)])
    device = next(scorer.model.parameters()).device
    flat = torch.tensor([token for sequence in sequences for token in sequence])
    places = torch.from_numpy(documents.places(len(flat)))
    ids_1T = torch.zeros(1, num_tokens, dtype=torch.int64)
    ids_1T[0, places] = flat
    is_chosen = torch.tensor([at > 0 for sequence in sequences for at in range(len(sequence))])
    chosen_N = places[is_chosen].to(device)
    ones_N = torch.ones(len(chosen_N), device=device)
    given = ids_1T.to(device), None, chosen_N, ones_N, documents.to(device)
    return score(*given).logprobs_N


def _thirds(num_tokens: int, shares: bool) -> tuple[list[int], int, Sequence[Taken] | None]:
    """Lengths of two documents, of the row that they fill, and the tokens that they share."""
    third, common = num_tokens // 3, num_tokens // 6 if shares else 0
    taken = (NOTHING_TAKEN, Taken(0, common)) if shares else None
    return [num_tokens - third, third + common], num_tokens, taken


def _sequences(lengths: Sequence[int], vocab_size: int, taken: Sequence[Taken]) -> list[list[int]]:
    """Made-up tokens of sequences; each begins with those that it takes over."""
    found: list[list[int]] = []
    for length, (of, num) in zip(lengths, taken, strict=True):
        own = [(3 + 7 * at + length) % vocab_size for at in range(num, length)]
        found.append([*found[of][:num], *own] if num else own)
    return found


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
