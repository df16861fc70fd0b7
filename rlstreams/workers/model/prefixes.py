"""Common prefixes of sequences, whose tokens one row needs once. Pure.

A sequence takes its first tokens over from an earlier one in its row, the one with the longest
common prefix. So prompts of a group are computed once, and turns of a dialogue, each of which
begins with all before it. A model's result for a token follows from the tokens up to it, and from
its experts where these are recorded; so both have to be the same.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Hashable, Sequence
from functools import cmp_to_key
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MOST_TAKEN = 15  # per token of a bin: a sequence has keys of its own for tokens it takes over


class Taken(NamedTuple):
    """The first tokens of a sequence, which its bin holds already as another's."""

    of: int  # number of the other sequence among those of the bin; it comes before
    tokens: int  # number of tokens taken over


NOTHING_TAKEN = Taken(0, 0)


class Tokens(NamedTuple):
    """A sequence's tokens, with the experts that also decide what a model computes."""

    token_ids: npt.NDArray[Any]  # integers (T,)
    experts: npt.NDArray[Any] | None = None  # (T - 1, ...): to be replayed
    recorded: npt.NDArray[Any] | None = None  # (T - 1,), 0: none are; None: all


class Prefixes:
    """Lengths of the common prefixes of sequences, which they may share."""

    def __init__(self, sequences: Sequence[Tokens], families: Sequence[Hashable] = ()) -> None:
        """
        Args:
            families: of each sequence: those of a family are laid out together. (): one family.
        """
        # In sorted order, all between two sequences begin with these two's common prefix.
        order = sorted(range(len(sequences)), key=_sorts(sequences))
        links = [0, *(_common(sequences[a], sequences[b]) for a, b in pairwise(order))]
        self._links = np.array(links)
        ranks = {index: rank for rank, index in enumerate(order)}
        self._ranks = [ranks[index] for index in range(len(sequences))]
        self.lengths = [len(one.token_ids) for one in sequences]
        self.families = tuple(families) or (0,) * len(sequences)

    def some(self, places: Sequence[int]) -> Prefixes:
        """The prefixes of the sequences at these places alone."""
        found: Prefixes = Prefixes.__new__(Prefixes)
        found._links, found._ranks = self._links, [self._ranks[place] for place in places]
        found.lengths = [self.lengths[place] for place in places]
        found.families = tuple(self.families[place] for place in places)
        return found

    def rank(self, index: int) -> int:
        """Place of a sequence in the order of all, by tokens."""
        return self._ranks[index]

    def common(self, index: int, rank: int) -> int:
        """Tokens that a sequence may take over from the one of that rank: never its last one."""
        low, high = sorted((self._ranks[index], rank))
        return min(int(self._links[low + 1 : high + 1].min()), self.lengths[index] - 1)

    def most(self, index: int) -> int:
        """Most tokens that a sequence may take over from any other."""
        rank = self._ranks[index]
        return min(int(self._links[rank : rank + 2].max()), self.lengths[index] - 1)

    def taken(self, members: Sequence[int]) -> tuple[Taken, ...]:
        """Tokens that each of these sequences takes over, if they are laid out in this order."""
        row = PrefixRow(self)
        return tuple(row.add(index) for index in members)


class PrefixRow:
    """Sequences that are laid out one behind another."""

    def __init__(self, prefixes: Prefixes) -> None:
        self._prefixes = prefixes
        self._places: dict[int, int] = {}  # number in the row by rank
        self._ranks: list[int] = []  # rising
        self.num_tokens = self.num_taken = 0

    def taken(self, index: int) -> Taken:
        """Tokens that a sequence would take over if it came next; of ties the first rank's."""
        at = bisect(self._ranks, self._prefixes.rank(index))
        found = NOTHING_TAKEN
        for rank in self._ranks[max(0, at - 1) : at + 1]:
            tokens = self._prefixes.common(index, rank)
            if tokens > found.tokens:
                found = Taken(self._places[rank], tokens)
        return found

    def add(self, index: int) -> Taken:
        """Lay a sequence out; the tokens that it takes over."""
        found, rank = self.taken(index), self._prefixes.rank(index)
        self._places[rank] = len(self._places)
        insort(self._ranks, rank)
        self.num_tokens += self._prefixes.lengths[index] - found.tokens
        self.num_taken += found.tokens
        return found

    def takes(self, index: int, bin_tokens: int) -> int | None:
        """Tokens that a sequence would take over if it came next; None: the bin is too full."""
        length = self._prefixes.lengths[index]
        tokens = self.taken(index).tokens
        fits = self.num_tokens + length - tokens <= bin_tokens
        return tokens if fits and self.num_taken + tokens <= MOST_TAKEN * bin_tokens else None


def _sorts(sequences: Sequence[Tokens]) -> Callable[[int], Any]:
    """Sort key of sequences, token by token, for an index into this list."""
    if all(one.experts is None for one in sequences):
        ids = [np.ascontiguousarray(one.token_ids, np.int32) for one in sequences]
        return lambda index: ids[index].tobytes()

    def compare(one: int, other: int) -> int:
        a, b = sequences[one], sequences[other]
        num = _common(a, b)
        if num == min(len(a.token_ids), len(b.token_ids)):
            return len(a.token_ids) - len(b.token_ids)
        return -1 if _at(a, num) < _at(b, num) else 1

    return cmp_to_key(compare)


def _at(sequence: Tokens, place: int) -> tuple[int, list[int]]:
    """A token, and its experts if they are recorded."""
    token = int(sequence.token_ids[place])
    if sequence.experts is None or not _is_routed(sequence, place + 1)[place]:
        return token, []
    return token, sequence.experts[place].ravel().tolist()


def _common(one: Tokens, other: Tokens) -> int:
    """Number of first tokens that are equal, with equal experts where these are replayed."""
    num = min(len(one.token_ids), len(other.token_ids))
    num = _alike(one.token_ids[:num], other.token_ids[:num])
    if one.experts is None and other.experts is None:
        return num
    is_routed = [_is_routed(sequence, num) for sequence in (one, other)]
    num = _alike(*is_routed)
    if one.experts is None or other.experts is None:
        return num
    rows = int(is_routed[0][:num].nonzero()[0].max(initial=-1)) + 1
    is_other = (one.experts[:rows] != other.experts[:rows]).any((1, 2))
    differs = is_other & is_routed[0][:rows]
    return int(differs.argmax()) if differs.any() else num


def _alike(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """Number of equal values at the beginning."""
    differs = one != other
    return int(differs.argmax()) if differs.any() else len(differs)


def _is_routed(sequence: Tokens, num: int) -> npt.NDArray[np.bool_]:
    """Mask of the first `num` tokens: those with recorded experts; a last token has none."""
    found = np.zeros(num, np.bool_)
    if sequence.experts is not None:
        rows = len(sequence.experts[:num])
        found[:rows] = True if sequence.recorded is None else sequence.recorded[:num] != 0
    return found


def own_tokens(
    real_BT: npt.NDArray[np.bool_], taken: Sequence[Taken] | None
) -> npt.NDArray[np.bool_]:
    """Mask of the rows' real tokens that are laid out with their own sequence, not another's."""
    if taken is None:
        return real_BT
    tokens_B = np.array([num for _, num in taken])
    return real_BT & (np.arange(real_BT.shape[1]) >= tokens_B[:, None])
