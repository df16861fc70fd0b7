"""Which samples share a micro-batch: every sample once, within the budget, little padding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.workers.model.cut import (
    Cut,
    bin_sizes,
    cut_bins,
    cut_evenly,
    cut_rows,
    cut_smaller,
    recorded_cut,
)
from tests import factories

LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 5000))
def test_rows_keep_the_budget(lengths: list[int], budget: int) -> None:
    """Each micro-batch fits when padded or holds one sample, and none could take the next one."""
    cut = cut_rows(lengths, budget)
    cut.check(len(lengths))
    tokens = [lengths[index] for index in cut.order]
    assert tokens == sorted(tokens, reverse=True)
    start = 0
    for size in cut.sizes:
        longest, start = tokens[start], start + size
        assert size == 1 or size * longest <= budget
        assert start == len(tokens) or (size + 1) * longest > budget


@given(LENGTHS, st.integers(128, 5000))
def test_bins_hold_their_samples(lengths: list[int], bin_tokens: int) -> None:
    """A bin is as large as configured or a few quarters of it; a longer sample is alone in one."""
    cut = cut_bins(lengths, bin_tokens)
    cut.check(len(lengths))
    for members, tokens in zip(cut.members, cut.bins, strict=True):
        held = sum(lengths[index] for index in members)
        assert held <= tokens
        assert tokens <= bin_tokens or len(members) == 1
    assert len({tokens for tokens in cut.bins if tokens <= bin_tokens}) <= 4


@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_ranks_share_what_a_last_round_has(lengths: list[int], hands: int, in_bins: bool) -> None:
    """In as many rounds as ever, of the same few sizes, and none wider."""
    whole = (cut_bins if in_bins else cut_rows)(lengths, 2048)
    cut = cut_evenly(lengths, 2048, hands, in_bins=in_bins)
    cut.check(len(lengths))
    full = len(whole.sizes) // hands * hands
    assert cut.members[:full] == whole.members[:full]
    assert -(-len(cut.sizes) // hands) == -(-len(whole.sizes) // hands)
    assert {*cut.bins} <= {*bin_sizes(2048), *whole.bins}
    widest = [max(map(_width(lengths), c.members[full:]), default=0) for c in (whole, cut)]
    assert widest[1] <= widest[0]
    if hands == 1:
        assert cut == whole


def _width(lengths: list[int]) -> Callable[[tuple[int, ...]], int]:
    return lambda own: sum(lengths[index] for index in own)


def test_eight_ranks_share_four_bins() -> None:
    """Twenty bins of 16,384 are two rounds, and eight of half the size."""
    cut = cut_evenly([1024] * 320, 16384, 8, in_bins=True)
    assert cut.bins == (16384,) * 16 + (8192,) * 8


@given(LENGTHS, st.booleans(), st.data())
def test_what_is_as_large_is_halved_too(
    lengths: list[int], in_bins: bool, data: st.DataObject
) -> None:
    """So that a step is begun anew a few times, not once a micro-batch; and ends with one each."""
    cut = (cut_bins if in_bins else cut_rows)(lengths, 2048)
    while True:
        failed = data.draw(st.integers(0, len(cut.sizes) - 1))
        smaller = cut_smaller(cut, lengths, 2048, failed)
        smaller.check(len(lengths))
        assert bool(smaller.bins) == in_bins
        assert smaller.order == cut.order
        if cut.sizes[failed] == 1:
            assert smaller == cut
            break
        assert len(smaller.sizes) > len(cut.sizes)
        cut = smaller


def test_little_of_a_bin_is_padding() -> None:
    """Lengths as answers have them: at most a twentieth of what is computed."""
    lengths = np.random.default_rng(0).lognormal(6.6, 0.8, 256).clip(16, 8192).astype(int).tolist()
    assert sum(cut_bins(lengths, 16384).bins) < 1.05 * sum(lengths)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (Cut(order=(0,), sizes=(1,)), r"order \(0,\) do not cut 2 samples"),
        (Cut(order=(0, 0), sizes=(2,)), "do not cut 2 samples"),
        (Cut(order=(1, 0), sizes=(2, 0)), r"of \(2, 0\) samples"),
        (Cut(order=(1, 0), sizes=(1, 1), bins=(8,)), "1 bins for 2 micro-batches"),
    ],
)
def test_a_cut_of_another_batch_is_refused(cut: Cut, message: str) -> None:
    """Of a ledger that tells of other samples, say."""
    with pytest.raises(ValueError, match=message):
        cut.check(2)


@pytest.mark.parametrize("cut_by", [cut_bins, cut_rows])
def test_a_cut_comes_back_from_the_log(cut_by: Callable[[list[int], int], Cut]) -> None:
    """Its bins too: of rows of several lengths two are filled, of other sizes."""
    cut = cut_by([300, 20, 700, 90, 40, 512, 5], 1024)
    assert len(set(cut.bins)) == (2 if cut_by is cut_bins else 0)
    event = factories.step_completed(1, order=cut.order, micro_batches=cut.sizes, bins=cut.bins)
    assert recorded_cut(event) == cut
