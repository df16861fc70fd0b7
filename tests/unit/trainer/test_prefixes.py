"""Which tokens a row has once: as many as can be, never too many, and groups lie together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.workers.model.cut import Cut, cut_bins, cut_evenly, cut_smaller, unshared
from rlstreams.workers.model.documents import Documents
from rlstreams.workers.model.prefixes import MOST_TAKEN, NOTHING_TAKEN, Prefixes, Taken, Tokens

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)
ROUTES = st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=8, max_size=8)


def prefixes_of(sequences: list[list[int]], families: list[int] | None = None) -> Prefixes:
    return Prefixes([Tokens(np.array(one)) for one in sequences], families or [])


def begin_alike(one: list[object], other: list[object]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(SEQUENCES)
def test_a_sequence_takes_over_the_most_that_it_can(sequences: list[list[int]]) -> None:
    """From one before it that has these tokens; its last one is always its own."""
    taken = prefixes_of(sequences).taken(range(len(sequences)))
    for place, (own, found) in enumerate(zip(sequences, taken, strict=True)):
        before = sequences[:place]
        most = max((begin_alike(own, other) for other in before), default=0)
        assert found.tokens == min(most, len(own) - 1)
        if found.tokens:
            assert found.of < place
            assert before[found.of][: found.tokens] == own[: found.tokens]


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), ROUTES), max_size=8))
def test_tokens_that_go_to_other_experts_are_others(
    drawn: list[tuple[list[int], list[tuple[int, bool]]]],
) -> None:
    """Also those that only one of the two has a record of; what nobody recorded says nothing."""
    tokens, told = [], []
    for ids, routes in drawn:
        rows = routes[: len(ids) - 1]
        experts = np.array([[[expert]] for expert, _ in rows], np.uint8).reshape(-1, 1, 1)
        recorded = np.array([is_recorded for _, is_recorded in rows], np.uint8)
        tokens.append(Tokens(np.array(ids), experts, recorded))
        known = [expert if is_recorded else None for expert, is_recorded in rows]
        told.append([*zip(ids, [*known, None], strict=True)])
    taken = Prefixes(tokens).taken(range(len(tokens)))
    for place, (own, (of, num)) in enumerate(zip(told, taken, strict=True)):
        most = max((begin_alike(own, other) for other in told[:place]), default=0)
        assert num == min(most, len(own) - 1)
        assert told[of][:num] == own[:num]


def test_a_prompt_with_the_same_routes_is_one() -> None:
    """And one whose second token went elsewhere is shared up to it."""
    rows = [np.array([[[e]] for e in own], np.uint8) for own in ([1, 2, 3], [1, 2, 3], [1, 0, 3])]
    ids = [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 9]]
    own = [Tokens(np.array(i), r) for i, r in zip(ids, rows, strict=True)]
    assert Prefixes(own).taken((0, 1)) == (NOTHING_TAKEN, Taken(0, 3))
    assert Prefixes(own).taken((0, 2)) == (NOTHING_TAKEN, Taken(0, 1))
    unrouted = Tokens(np.array(ids[1]))
    assert Prefixes([own[0], unrouted]).taken((0, 1))[1].tokens == 0


def own_tokens(cut: Cut, prefixes: Prefixes) -> list[int]:
    """By bin."""
    return [
        sum(prefixes.lengths[i] for i in own) - sum(t.tokens for t in prefixes.taken(own))
        for own in cut.members
    ]


def check(cut: Cut, prefixes: Prefixes, bin_tokens: int) -> None:
    """What a bin has fits it, with its keys."""
    cut.check(len(prefixes.lengths))
    bins = zip(cut.members, cut.bins, own_tokens(cut, prefixes), strict=True)
    for own, size, held in bins:
        lengths = [prefixes.lengths[index] for index in own]
        assert held <= size
        assert sum(lengths) - held <= MOST_TAKEN * size
        assert size <= bin_tokens or len(own) == 1
        Documents.of(lengths, size, prefixes.taken(own))  # refuses what does not fit


@given(SEQUENCES, st.integers(1, 3), st.integers(1, 4), st.data())
def test_bins_hold_what_sequences_do_not_share(
    sequences: list[list[int]], longer: int, hands: int, data: st.DataObject
) -> None:
    """However they are cut: for several ranks, smaller for memory, and with nothing shared."""
    sequences = [[t for t in own for _ in range(50 * longer)] for own in sequences]
    families = [index // 3 for index in range(len(sequences))]
    prefixes = prefixes_of(sequences, families)
    lengths, size = prefixes.lengths, 512
    cut = cut_evenly(lengths, size, hands, in_bins=True, prefixes=prefixes)
    check(cut, prefixes, size)
    failed = data.draw(st.integers(0, len(cut.sizes) - 1))
    check(cut_smaller(cut, lengths, size, failed, prefixes), prefixes, size)
    whole = unshared(cut, lengths, size)
    assert whole.order == cut.order
    for own, tokens in zip(whole.members, whole.bins, strict=True):
        assert sum(lengths[index] for index in own) <= tokens


def test_what_is_read_again_and_again_is_bounded() -> None:
    """A bin has keys for so many tokens alone: copies of one sequence fill several."""
    prefixes = prefixes_of([[1] * 65] * 400)
    cut = cut_bins(prefixes.lengths, 512, prefixes)
    check(cut, prefixes, 512)
    assert cut.sizes == (121, 121, 121, 37)
    assert own_tokens(cut, prefixes)[0] == 65 + MOST_TAKEN * 512 // 64


def groups(num: int, prompt: int, lengths: list[int]) -> tuple[list[list[int]], list[int]]:
    random = np.random.default_rng(0)
    sequences, families = [], []
    for group in range(num):
        first = random.integers(0, 9, prompt).tolist()
        for length in lengths:
            sequences.append(first + random.integers(0, 9, length).tolist())
            families.append(group)
    return sequences, families


def test_the_prompts_of_groups_are_computed_once_or_where_a_bin_ends() -> None:
    """32 groups of 8, prompts of 200, answers of 1,024: 18 bins of the 20 that whole samples take;
    each prompt is there once, and once more for each end of a bin. In whatever order they come."""
    sequences, families = groups(32, 200, [1024] * 8)
    turned = np.random.default_rng(1).permutation(256).tolist()
    for order in (list(range(256)), turned):
        prefixes = prefixes_of([sequences[i] for i in order], [families[i] for i in order])
        cut = cut_bins(prefixes.lengths, 16384, prefixes)
        check(cut, prefixes, 16384)
        tokens = sum(own_tokens(cut, prefixes))
        assert 256 * 1024 + 32 * 195 < tokens < 256 * 1024 + (32 + len(cut.bins)) * 200
        assert sum(cut.bins) < 0.88 * sum(cut_bins(prefixes.lengths, 16384).bins)


def test_a_dialogue_is_computed_once() -> None:
    """Ten calls of which each begins with all before it: a sixth of what they take one by one."""
    random, turn, calls = np.random.default_rng(0), list[int](), []
    for num in (500, *[300] * 9):
        turn = turn + random.integers(0, 9, num).tolist()
        calls.append(turn)
    prefixes = prefixes_of(calls)
    cut = cut_bins(prefixes.lengths, 16384, prefixes)
    assert own_tokens(cut, prefixes) == [len(calls[-1]) + 9]
    assert sum(map(len, calls)) > 5 * len(calls[-1])


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        ((NOTHING_TAKEN, Taken(1, 2)), r"take over \[0, 2\]"),  # of itself
        ((NOTHING_TAKEN, Taken(0, 4)), r"\[0, 4\]"),  # of one that has three
        ((NOTHING_TAKEN, Taken(0, 5)), r"\[0, 5\]"),  # all of it
    ],
)
def test_what_no_row_can_hold_is_refused(taken: tuple[Taken, ...], message: str) -> None:
    """By its lengths."""
    with pytest.raises(ValueError, match=message):
        Documents.of([3, 5], 8, taken)
