"""Trajectories become arrays, cut in a way that can be given again."""

from dataclasses import replace

import numpy as np
import pytest

from rlstreams.schemas.events import MaskedSegment, Segment
from rlstreams.workers.model.cut import Cut
from tests.unit.trainer.trainer_builders import (
    floats,
    ids,
    packed_within,
    policy_segment,
    prompt_segment,
    random_samples,
    score,
    scored,
)

ARRAYS = (
    "token_ids_BT",
    "real_BT",
    "loss_mask_BT",
    "behavior_logprobs_BT",
    "proximal_logprobs_BT",
    "is_true_anchor_BT",
    "temperature_BT",
    "advantages_B",
)


def packed(samples, masked=(), **options):
    defaults = {"policy_version": 2, "token_budget": 1000}
    advantages = np.arange(1, len(samples) + 1, dtype=np.float32)
    return packed_within(samples, advantages, masked, **(defaults | options))


def two_turns():
    """Prompt, answer under version 1, environment, answer under version 2."""
    return scored(
        (
            prompt_segment([1, 2]),
            policy_segment([3], [-0.5], version=1),
            Segment(author="environment", token_ids=ids([4])),
            policy_segment([5, 6], [-1.0, -1.5], version=2, temperature=0.5),
        ),
        (score(1, [-0.25]), score(3, [-1.25, -1.75], anchor="nearby")),
        sample=1,
    )


def test_tokens_and_their_numbers_share_a_column():
    """Prompt, environment and padding are outside of the loss; each token keeps its own numbers."""
    batch = packed([two_turns(), scored()])
    (micro,) = batch.micro_batches
    np.testing.assert_array_equal(micro.token_ids_BT, [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 0, 0]])
    np.testing.assert_array_equal(micro.real_BT, [[1] * 6, [1, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(micro.loss_mask_BT, [[0, 0, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0]])
    np.testing.assert_array_equal(
        micro.behavior_logprobs_BT, [[0, 0, -0.5, 0, -1, -1.5], [0, 0, -0.5, -1, 0, 0]]
    )
    np.testing.assert_array_equal(
        micro.proximal_logprobs_BT,
        np.float32([[0, 0, -0.25, 0, -1.25, -1.75], [0, 0, -0.6, -0.9, 0, 0]]),
    )
    np.testing.assert_array_equal(micro.temperature_BT, [[1, 1, 1, 1, 0.5, 0.5], [1] * 6])
    np.testing.assert_array_equal(micro.is_true_anchor_BT, [[0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]])
    np.testing.assert_array_equal(micro.advantages_B, [1, 2])


def test_the_ledger_counts_what_is_trained():
    """Loss tokens by staleness and by anchor are counted from the arrays' own segments."""
    batch = packed([two_turns(), scored()])
    assert batch.num_loss_tokens == 5
    assert batch.staleness == {"0": 2, "1": 1, "2": 2}
    assert batch.anchors == {"nearby": 2, "sampled": 3}


def test_a_segment_without_tokens_is_in_no_count():
    """Of an answer that was interrupted before its first token under the old version."""
    segments = (
        prompt_segment([1, 2]),
        policy_segment([], [], version=0),
        policy_segment([3, 4], [-0.5, -1.0], version=2),
    )
    batch = packed([scored(segments, (score(1, [], anchor="nearby"), score(2, [-0.6, -0.9])))])
    assert batch.staleness == {"0": 2}
    assert batch.anchors == {"sampled": 2}


def test_a_masked_segment_is_seen_but_not_learnt():
    """Its tokens stay in the sequence and out of the loss and of every count."""
    masked = MaskedSegment(group_id="0", sample=1, segment=1, staleness=9)
    batch = packed([two_turns(), scored()], [masked])
    (micro,) = batch.micro_batches
    np.testing.assert_array_equal(micro.loss_mask_BT[0], [0, 0, 0, 0, 1, 1])
    np.testing.assert_array_equal(micro.token_ids_BT[0], [1, 2, 3, 4, 5, 6])
    assert (batch.num_loss_tokens, batch.staleness) == (4, {"0": 2, "2": 2})


def test_a_given_cut_is_kept():
    """A redo cuts as the step did, whatever the budget says now, and gets the same arrays."""
    samples = random_samples(9)
    first = packed(samples, token_budget=14, in_bins=True)
    again = packed(samples, token_budget=1, cut=first.cut)
    assert again.cut == first.cut
    for one, other in zip(first.micro_batches, again.micro_batches, strict=True):
        assert one.bin_tokens == other.bin_tokens > 0
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cut": Cut(order=(0,), sizes=(1,))}, "do not cut 2 samples"),
        (
            {"masked": [MaskedSegment(group_id="0", sample=0, segment=0, staleness=1)]},
            r"not in the batch: \[\('0', 0, 0\)\]",
        ),
        (
            {
                "masked": [
                    MaskedSegment(group_id="0", sample=s, segment=i, staleness=1)
                    for s, i in ((0, 1), (1, 1), (1, 3))
                ]
            },
            "batch of 2 samples has no token",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        packed([scored(), two_turns()], **options)


def test_advantages_are_one_per_sample():
    with pytest.raises(ValueError, match="1 advantages for 2 samples"):
        packed_within([scored(), two_turns()], np.ones(1), [], policy_version=2, token_budget=99)


def test_each_token_has_its_own_reference() -> None:
    """In the column of the token, 0 elsewhere; where none was recorded no number is made up."""
    segments = (prompt_segment(), policy_segment([3, 4], [-1, -1]), policy_segment([5], [-1]))
    scores = (
        replace(score(1, [-1, -1]), reference_logprobs=floats([-2, -3])),
        replace(score(2, [-1]), reference_logprobs=floats([-4])),
    )
    other = replace(score(1, [-0.6, -0.9]), reference_logprobs=floats([-1, -2]))
    samples = [scored(segments, scores), scored(scores=(other,), sample=1)]
    advantages = np.zeros(2, np.float32)
    (batch,) = packed_within(
        samples, advantages, [], policy_version=0, token_budget=99
    ).micro_batches
    assert batch.reference_logprobs_BT is not None
    assert batch.reference_logprobs_BT[0].tolist() == [0, 0, -2, -3, -4]
    samples[1] = scored(sample=1)
    (batch,) = packed_within(
        samples, advantages, [], policy_version=0, token_budget=99
    ).micro_batches
    assert batch.reference_logprobs_BT is not None
    assert batch.reference_logprobs_BT[0].tolist() == [0, 0, -2, -3, -4]
    assert np.isnan(batch.reference_logprobs_BT[1]).tolist() == [False, False, True, True, False]
