"""Tokens as arrays, their words, and how large a difference is."""

from __future__ import annotations

import numpy as np
import pytest

from rlstreams.schemas.events import ScoredTrajectory, TensorError, Trajectory
from rlstreams.streams.tokens import mismatch, token_table
from rlstreams.words.spelling import NUMBERS, Spelling, words
from tests import factories as f
from tests.unit.inspect import told_run


def scored_of(*versions: int, **changes: object) -> ScoredTrajectory:
    event = told_run.scored("1", 0, *versions, **changes)[-1]
    assert isinstance(event, ScoredTrajectory)
    return event


def test_tokens_of_all_segments_lie_in_one_table() -> None:
    """Author, version and log-probs of each; nothing where no policy sampled."""
    event = scored_of(0, 1)
    table = token_table(event.trajectory, event)
    assert [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7] == table.ids_N.tolist()
    assert [-1] * 5 + [0] * 3 + [1] * 3 == table.version_N.tolist()
    assert [False] * 5 + [True] * 6 == table.is_policy_N.tolist()
    assert np.isnan(table.behavior_N[:5]).all()
    assert [0.0, -0.125, 0.5] * 2 == table.difference_N[5:].tolist()
    assert np.isnan(table.reference_N).all()


def test_without_scores_there_is_no_difference() -> None:
    """An evaluation has behavior log-probs only."""
    table = token_table(scored_of(0).trajectory)
    assert np.isnan(table.difference_N).all()
    assert [-0.5, -0.25, -1.0] == table.behavior_N[5:].tolist()


def test_an_anchor_that_repeats_the_sampler_tells_no_difference() -> None:
    """Proximal is behavior there by definition, so a zero would be a claim that nobody made."""
    event = scored_of(0)
    repeated = f.score(3, 0, anchor="behavior", proximal_logprobs=told_run.floats([-0.5] * 3))
    event = f.scored(event.trajectory, scores=(repeated,))
    assert np.isnan(token_table(event.trajectory, event).proximal_N).all()
    assert np.isnan(mismatch(event))


@pytest.mark.parametrize(("anchor", "expected"), [("sampled", 0.5), ("nearby", float("nan"))])
def test_mismatch_is_of_one_version(anchor: str, expected: float) -> None:
    """What was scored under another version holds its staleness too, and does not count."""
    score = f.score(3, 0, anchor=anchor, proximal_logprobs=told_run.floats(told_run.PROXIMAL))
    event = f.scored(scored_of(0).trajectory, scores=(score,))
    np.testing.assert_equal(mismatch(event), expected)


def test_numbers_that_do_not_fit_their_segment_are_refused() -> None:
    event = f.scored(scored_of(0).trajectory, scores=(f.score(2, 0),))
    with pytest.raises(TensorError, match=r"a segment of 3 tokens has numbers of shape \(2,\)"):
        token_table(event.trajectory, event)
    with pytest.raises(TensorError, match="a segment of 3 tokens"):
        mismatch(event)


def test_a_trajectory_without_tokens() -> None:
    event = Trajectory(**{**_fields(scored_of(0).trajectory), "segments": ()})
    assert 0 == len(token_table(event).ids_N)


def _fields(event: Trajectory) -> dict[str, object]:
    return {name: getattr(event, name) for name in Trajectory.__slots__}


def spelled(decode: object) -> Spelling:
    return Spelling(decode=decode, plain=decode, hash="h")  # type: ignore[arg-type]


def test_joined_words_are_the_text() -> None:
    """Also far beyond the window that is decoded together."""
    ids = [n % len(told_run.WORDS) for n in range(500)]
    found = words(ids, spelled(told_run.decode))
    assert told_run.decode(ids) == "".join(found)
    assert len(ids) == len(found)


def test_a_character_of_several_tokens_stands_at_its_last() -> None:
    """Byte-level tokenizers cut characters; half a one is no text."""
    text = "aé€😀b".encode()
    found = words(list(text), spelled(lambda ids: bytes(ids).decode("utf-8", "replace")))
    assert ["a", "", "é", "", "", "€", "", "", "", "😀", "b"] == found


def test_the_time_grows_with_the_length() -> None:
    """Each token is decoded with a bounded number of others."""
    decoded = []
    words(list(range(2000)), spelled(lambda ids: decoded.append(len(ids)) or "x" * len(ids)))
    assert max(decoded) < 64
    assert len(decoded) < 2 * 2000


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    """One each, with a space to tell them apart."""
    assert ["7 ", "12 "] == words([7, 12], NUMBERS)
