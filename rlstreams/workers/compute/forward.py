"""Forwards over sequences: the cut into forwards, and each sequence's scores from them.

A cut follows from the order and lengths of the sequences, so the same call gives the same bits.
Axes: `B` sequence, `T` token, `N` token that is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlstreams.workers.engines.base import Scores, TokenSequence, check_sequences
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.cut import Cut, cut_bins, cut_rows, one_row, rows_of
from rlstreams.workers.model.device import on_device
from rlstreams.workers.model.documents import Documents
from rlstreams.workers.model.model import right_padded
from rlstreams.workers.model.prefixes import Prefixes, Taken, Tokens, own_tokens
from rlstreams.workers.model.routes import RouterShape, check_routes, padded_routes
from rlstreams.workers.model.routing import Routes
from rlstreams.workers.model.token_scores import Score


class ForwardPart(NamedTuple):
    """The sequences of one forward."""

    sequences: Sequence[TokenSequence]
    bin_tokens: int = 0  # 0: padded rows
    taken: Sequence[Taken] | None = None  # by sequence, tokens taken over from others of the bin


class Forward:
    """One pass through a model: log-probs and entropies of all tokens but each sequence's first."""

    def __init__(
        self, score: Score, device: torch.device, routers: RouterShape | None, top_k: int = 0
    ) -> None:
        """
        Args:
            routers: shape of the model's routers, where recorded routes are replayed; else None.
            top_k: number of likeliest tokens of each distribution to score too; 0: none.
        """
        self._top = (top_k,) if top_k else ()
        self._score = score
        self._device = device
        self._tensor = partial(on_device, device)
        self._routers = routers

    def __call__(self, part: ForwardPart, temperature: float) -> tuple[Tensor, ...]:
        """Log-probs and entropies, then log-probs and ids of the likeliest tokens, if asked for. A
        temperature of 0 counts as 1."""
        sequences, bin_tokens, taken = part
        ids_BT, real_BT = (t.numpy() for t in right_padded([s.token_ids for s in sequences], 0))
        chosen_BT = real_BT.copy()
        chosen_BT[:, :1] = False
        arrays = [ids_BT, *self._routes(sequences, ids_BT.shape[1])]
        documents, back = None, None
        if bin_tokens:
            documents = Documents.of(real_BT.sum(1).tolist(), bin_tokens, taken)
            chosen, back = documents.scored(chosen_BT[real_BT])
            documents = documents.to(self._device)
            own_BT = own_tokens(real_BT, taken)
            arrays = [one_row(array, own_BT, bin_tokens) for array in arrays]
        else:
            chosen = np.flatnonzero(chosen_BT)
        ids, *routes = arrays
        chosen_N = self._tensor(chosen)
        temperature_N = torch.full((len(chosen_N),), temperature or 1.0, device=self._device)
        is_real = None if bin_tokens else self._tensor(real_BT)
        followed = Routes(*map(self._tensor, routes)) if routes else None
        with self._score.routing.replaying(followed):
            scores = self._score(
                self._tensor(ids), is_real, chosen_N, temperature_N, documents, *self._top
            )
        scores = scores.at(None if back is None else self._tensor(back))
        found = (scores.logprobs_N, scores.entropy_N)
        if scores.top_NK is None or scores.top_ids_NK is None:
            return found
        return *found, scores.top_NK, scores.top_ids_NK.int()

    def _routes(self, sequences: Sequence[TokenSequence], width: int) -> tuple[Any, ...]:
        if self._routers is None:
            return ()
        return (
            padded_routes([(s.routed_experts, s.routed_experts_mask) for s in sequences], width)
            or ()
        )


def check_all(
    sequences: Sequence[TokenSequence],
    vocab_size: int,
    max_tokens: int,
    routers: RouterShape | None,
) -> None:
    """
    Raises:
        EngineError: ids out of range, a sequence too long, or routes of another model.
    """
    check_sequences(sequences, vocab_size, max_tokens)
    for index, sequence in enumerate(sequences):
        if routers is not None and sequence.routed_experts is not None:
            try:
                check_routes(sequence.routed_experts, sequence.routed_experts_mask, routers)
            except ValueError as err:
                raise EngineError(f"sequence {index}: {err}") from err


def prefixes_of(sequences: Sequence[TokenSequence]) -> Prefixes:
    """Prefixes that sequences have in common; those of one group are laid out together."""
    tokens = [Tokens(s.token_ids, s.routed_experts, s.routed_experts_mask) for s in sequences]
    return Prefixes(tokens, [sequence.group_id for sequence in sequences])


def cut_of(
    sequences: Sequence[TokenSequence],
    token_budget: int,
    *,
    in_bins: bool,
    prefixes: Prefixes | None,
) -> Cut:
    """Cut into forwards, which follows from the sequences and their order alone.

    Args:
        prefixes: those of the sequences, where bins share tokens.
    """
    lengths = [len(sequence.token_ids) for sequence in sequences]
    return cut_bins(lengths, token_budget, prefixes) if in_bins else cut_rows(lengths, token_budget)


def parts_of(
    cut: Cut, sequences: Sequence[TokenSequence], prefixes: Prefixes | None
) -> list[ForwardPart]:
    """The forwards of a cut, in its order."""
    rows = zip(cut.members, rows_of(cut, prefixes), strict=True)
    return [ForwardPart([sequences[index] for index in own], *row) for own, row in rows]


def in_order(
    cut: Cut,
    sequences: Sequence[TokenSequence],
    *columns: np.ndarray[Any, Any],
) -> list[Scores]:
    """Scores by sequence, from the forwards' results, concatenated in the order of the cut."""
    ends = np.cumsum([len(sequences[index].token_ids) - 1 for index in cut.order])[:-1]
    parts = zip(*(np.split(column, ends) for column in columns), strict=True)
    by_place = dict(zip(cut.order, parts, strict=True))
    names = ("logprobs", "entropy", "top_logprobs", "top_ids")[: len(columns)]
    return [
        Scores(**dict(zip(names, map(_from_second, by_place[i]), strict=True)))
        for i in range(len(sequences))
    ]


def _from_second(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Values of all tokens of a sequence: those given, behind a 0 for the first token."""
    return np.concatenate([np.zeros((1, *values.shape[1:]), values.dtype), values])
