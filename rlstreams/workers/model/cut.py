"""The cut of sequences into forward passes, in order. Pure: the sequences alone decide.

Trainer and log-prob worker cut alike. A trainer's cut is in the ledger with every step; a scorer's
follows from the order of the window that it recorded. Rows are padded to the longest of their
micro-batch, so neighbours in length share one. Bins are rows of one size in which samples lie one
behind another: first-fit-decreasing, whose bins are at most 11/9 of the fewest (Johnson 1973). A
bin that is not needed whole is cut at a quarter: few sizes, for layers are compiled for each.

With `Prefixes` a sequence takes its first tokens over from an earlier one in its bin, and needs
room for its others alone. A group is laid out together, in the bin where it takes most tokens over.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import StepCompleted
from rlstreams.workers.model.prefixes import MOST_TAKEN, Prefixes, PrefixRow, Taken

_ALIGNED = 128  # tokens: the kernels' block size


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Micro-batches of a batch, in order."""

    order: tuple[int, ...]  # places in the batch, as the micro-batches take them
    sizes: tuple[int, ...]  # samples in each; sums to len(order)
    bins: tuple[int, ...] = ()  # tokens of each micro-batch's bin; (): padded rows

    @property
    def members(self) -> list[tuple[int, ...]]:
        """Samples of each micro-batch, as places in the batch."""
        found, end = [], 0
        for size in self.sizes:
            found.append(self.order[end : end + size])
            end += size
        return found

    def check(self, num_samples: int) -> None:
        """
        Raises:
            ValueError: the cut is of another batch.
        """
        is_whole = sorted(self.order) == list(range(num_samples))
        if not is_whole or sum(self.sizes) != num_samples or min(self.sizes, default=0) < 1:
            raise ValueError(
                f"micro-batches of {self.sizes} samples in the order {self.order} do not cut "
                f"{num_samples} samples"
            )
        if self.bins and len(self.bins) != len(self.sizes):
            raise ValueError(f"{len(self.bins)} bins for {len(self.sizes)} micro-batches")


def recorded_cut(event: StepCompleted) -> Cut:
    """The cut that a step recorded."""
    return Cut(
        order=event.order or tuple(range(sum(event.rows) or len(event.samples))),
        sizes=event.micro_batches,
        bins=event.bins,
    )


def cut_rows(lengths: Sequence[int], budget: int) -> Cut:
    """Padded rows, longest first: as many neighbours as fit `budget` tokens when padded."""
    order = _longest_first(lengths)
    sizes: list[int] = []
    longest = 0
    for index in order:
        if sizes and (sizes[-1] + 1) * longest <= budget:
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest = lengths[index]
    return Cut(order=order, sizes=tuple(sizes))


def cut_bins(lengths: Sequence[int], bin_tokens: int, prefixes: Prefixes | None = None) -> Cut:
    """Bins of that size; a longer sample gets one of its own.

    Args:
        prefixes: of the same sequences, if these share tokens; None: they do not.
    """
    if prefixes is not None:
        return _cut_shared(prefixes, bin_tokens)
    members: list[list[int]] = []
    left: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        place = next((n for n, tokens in enumerate(left) if tokens >= length), None)
        if place is None:
            members.append([index])
            left.append(bin_tokens - length)
        else:
            members[place].append(index)
            left[place] -= length
    return _binned(members, lengths, bin_tokens)


def _cut_shared(prefixes: Prefixes, bin_tokens: int) -> Cut:
    """Family by family, each sample into the bin where it takes most over, else the first."""
    lengths, families = prefixes.lengths, prefixes.families
    longest: dict[Hashable, tuple[int, int]] = {}
    for place, index in enumerate(_longest_first(lengths)):
        longest.setdefault(families[index], (-lengths[index], place))
    order = sorted(
        range(len(lengths)), key=lambda index: (*longest[families[index]], -lengths[index], index)
    )
    members: list[list[int]] = []
    rows: list[PrefixRow] = []
    for index in order:
        room = bin_tokens - lengths[index] + prefixes.most(index)  # most bins have none
        takes = [row.takes(index, bin_tokens) if row.num_tokens <= room else None for row in rows]
        most = max((tokens for tokens in takes if tokens is not None), default=None)
        if most is None:
            members.append([])
            rows.append(PrefixRow(prefixes))
        place = len(rows) - 1 if most is None else takes.index(most)
        members[place].append(index)
        rows[place].add(index)
    return _binned(members, lengths, bin_tokens, prefixes)


def cut_evenly(
    lengths: Sequence[int],
    budget: int,
    hands: int,
    *,
    in_bins: bool,
    prefixes: Prefixes | None = None,
) -> Cut:
    """`cut_bins` or `cut_rows`, in rounds of `hands` micro-batches that are computed side by side.

    The micro-batches of an incomplete last round are cut smaller, so that all compute a share.

    Args:
        prefixes: see `cut_bins`.
    """

    def cut_by(places: Sequence[int], size: int) -> Cut:
        own = [lengths[place] for place in places]
        if not in_bins:
            return cut_rows(own, size)
        return cut_bins(own, size, prefixes and prefixes.some(places))

    whole = cut_by(range(len(lengths)), budget)
    if not (rest := len(whole.sizes) % hands):
        return whole
    members = whole.members
    last = sorted(index for own in members[-rest:] for index in own)
    for size in reversed(bin_sizes(budget)):  # the budget, tried last, gives `rest` of them
        shares = cut_by(last, size).members
        if len(shares) <= hands:
            break
    members[-rest:] = [tuple(last[place] for place in share) for share in shares]
    if in_bins:
        return _binned(members, lengths, budget, prefixes)
    order = tuple(index for own in members for index in own)
    return Cut(order=order, sizes=tuple(len(own) for own in members))


def unshared(cut: Cut, lengths: Sequence[int], bin_tokens: int) -> Cut:
    """The same bins, wider where a bin has no room for all tokens of each of its samples."""
    wider = _binned(cut.members, lengths, bin_tokens).bins
    held = (sum(lengths[index] for index in own) for own in cut.members)
    sizes = zip(held, cut.bins, wider, strict=True)
    return replace(cut, bins=tuple(size if n <= size else wide for n, size, wide in sizes))


def cut_smaller(
    cut: Cut,
    lengths: Sequence[int],
    bin_tokens: int,
    failed: int,
    prefixes: Prefixes | None = None,
) -> Cut:
    """Halve the failed micro-batch and every one at least as large.

    Args:
        prefixes: see `cut_bins`.

    Returns:
        The same cut if the failed micro-batch holds a single sample.
    """
    if cut.sizes[failed] == 1:
        return cut
    members = cut.members

    def tokens(number: int) -> int:
        longest = max(lengths[index] for index in members[number])
        return cut.bins[number] if cut.bins else longest * len(members[number])

    halved: list[list[int]] = []
    for number, own in enumerate(members):
        half = len(own) - len(own) // 2
        is_cut = len(own) > 1 and tokens(number) >= tokens(failed)
        halved += [list(own[:half]), list(own[half:])] if is_cut else [list(own)]
    if cut.bins:
        return _binned(halved, lengths, bin_tokens, prefixes)
    return Cut(
        order=tuple(index for own in halved for index in own),
        sizes=tuple(len(own) for own in halved),
    )


def rows_of(cut: Cut, prefixes: Prefixes | None) -> list[tuple[int, tuple[Taken, ...] | None]]:
    """For each micro-batch the tokens of its bin, 0 for padded rows, and the tokens that its
    samples take over; None where bins share none.

    Args:
        prefixes: those of the cut.
    """
    bins = zip(cut.members, cut.bins or (0,) * len(cut.sizes), strict=True)
    return [(num, prefixes.taken(own) if prefixes and num else None) for own, num in bins]


def one_row(
    values_BT: npt.NDArray[Any], real_BT: npt.NDArray[np.bool_], num_tokens: int
) -> npt.NDArray[Any]:
    """Values of the rows' real tokens, one row behind another: (1, `num_tokens`, ...)."""
    values = values_BT[real_BT]
    row = np.zeros((1, num_tokens, *values.shape[1:]), values.dtype)
    row[0, : len(values)] = values
    return row


def _longest_first(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)))


def bin_sizes(bin_tokens: int) -> tuple[int, ...]:
    """Sizes of bins that hold no sample longer than `bin_tokens`, largest first."""
    quarter = _quarter(bin_tokens)
    return (bin_tokens, *range(quarter * ((bin_tokens - 1) // quarter), 0, -quarter))


def _quarter(bin_tokens: int) -> int:
    return -(-bin_tokens // (4 * _ALIGNED)) * _ALIGNED


def _binned(
    members: Sequence[Sequence[int]],
    lengths: Sequence[int],
    bin_tokens: int,
    prefixes: Prefixes | None = None,
) -> Cut:
    quarter = _quarter(bin_tokens)
    bins = []
    for own in members:
        tokens = sum(lengths[index] for index in own)
        if prefixes is not None:
            row = PrefixRow(prefixes)
            for index in own:
                row.add(index)
            tokens = max(row.num_tokens, -(-row.num_taken // MOST_TAKEN))
        whole = -(-tokens // quarter) * quarter
        bins.append(bin_tokens if tokens <= bin_tokens < whole else whole)
    return Cut(
        order=tuple(index for own in members for index in own),
        sizes=tuple(len(own) for own in members),
        bins=tuple(bins),
    )
