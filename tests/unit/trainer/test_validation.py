"""What cannot be trained on is refused, by field, index and value."""

from dataclasses import replace

import numpy as np
import pytest

from rlstreams.schemas.events import Segment, Tensor
from rlstreams.workers.trainer.intake.validation import validate
from tests.unit.trainer.trainer_builders import (
    VOCAB_SIZE,
    floats,
    ids,
    policy_segment,
    prompt_segment,
    score,
    scored,
)

PROMPT = prompt_segment()
ANSWER = policy_segment([3, 4], [-0.5, -1.0])
MAX_TOKENS = 7
NAN, INF = float("nan"), float("inf")


def with_answer(**changes):
    return scored((PROMPT, replace(ANSWER, **changes)))


def with_parts(**parts):
    whole = scored((PROMPT, ANSWER))
    return replace(whole, trajectory=replace(whole.trajectory, reward_parts=parts))


def with_score(**changes):
    return scored(scores=(replace(score(1, [-0.6, -0.9]), **changes),))


def bytes_of(*values):
    return Tensor.of(np.array(values, np.uint8))


def bomb(dtype, *shape):
    """A few bytes, whose frame declares what the shape asks for; none of it is to be unpacked."""
    return Tensor(dtype=dtype, shape=shape, codec="zstd", data=b"not looked at")


TWICE = Tensor.of(np.zeros((3, 1, 2), np.uint8))


def with_experts(mask, routed=TWICE):
    """Four tokens, so three rows; each names an expert twice."""
    whole = scored((PROMPT, ANSWER))
    trajectory = replace(whole.trajectory, routed_experts=routed, routed_experts_mask=mask)
    return replace(whole, trajectory=trajectory)


def test_good_ones_pass():
    """A plain one, log-probs a rounding above 0, and an environment between two answers."""
    validate(scored(), VOCAB_SIZE, MAX_TOKENS)
    validate(with_answer(behavior_logprobs=floats([5e-5, 0.0])), VOCAB_SIZE, MAX_TOKENS)
    environment = Segment(author="environment", token_ids=ids([5]))
    both = (score(1, [-1, -1]), score(3, [-1, -1], anchor="behavior"))
    validate(scored((PROMPT, ANSWER, environment, ANSWER), both), VOCAB_SIZE, MAX_TOKENS)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (scored(reward=NAN), "reward must be finite and within 1e.09 of 0, got nan"),
        (scored(reward=-INF), "reward must be finite .* got -inf"),
        (scored(reward=1e39), r"reward must be finite .* got 1e\+39"),
        (with_parts(right=0.0, speed=-1.7e308), r"reward_parts\['speed'\] must be .*-1.7e\+308"),
        (scored(sample=8), "sample must be below group_size 8, got 8"),
        (with_answer(token_ids=ids([3, 12])), r"segments\[1\].token_ids\[1\] .* 12, got 12"),
        (with_answer(token_ids=ids([-1, 3])), r"segments\[1\].token_ids\[0\] .* got -1"),
        (with_answer(token_ids=floats([3, 4])), r"segments\[1\].token_ids must be integers"),
        (with_answer(token_ids=ids([[3, 4]])), r"token_ids must be integers .*\[1, 2\]"),
        (with_answer(author="user"), r"segments\[1\].author .* got 'user'"),
        (with_answer(policy_version=-1), r"segments\[1\].policy_version .* got -1"),
        (with_answer(temperature=0.0), r"segments\[1\].temperature .* got 0.0"),
        (with_answer(temperature=1e-40), r"segments\[1\].temperature .* got 1e-40"),
        (with_answer(temperature=1e39), r"segments\[1\].temperature .* at most 1e.30, got 1e.39"),
        (with_answer(temperature=NAN), r"segments\[1\].temperature .* got nan"),
        (with_answer(behavior_logprobs=None), r"segments\[1\].behavior_logprobs is missing"),
        (with_answer(behavior_logprobs=floats([-1])), r"behavior_logprobs must be floats \[2\]"),
        (with_answer(behavior_logprobs=floats([-1, NAN])), r"behavior_logprobs\[1\] .* got nan"),
        (with_answer(behavior_logprobs=floats([-INF, -1])), r"behavior_logprobs\[0\] .* got -inf"),
        (with_answer(behavior_logprobs=floats([-1, 0.5])), r"behavior_logprobs\[1\] .* got 0.5"),
        (with_answer(behavior_logprobs=ids([-1, -1])), "behavior_logprobs must be floats"),
        (with_score(proximal_logprobs=floats([-1])), r"scores\[0\].proximal_logprobs .*\[2\]"),
        (with_score(proximal_logprobs=floats([-1, INF])), r"proximal_logprobs\[1\] .* got inf"),
        (with_score(anchor="newest"), r"scores\[0\].anchor .* got 'newest'"),
        (with_experts(None), r"routed_experts\[0, 0\] names an expert twice"),
        (with_experts(bytes_of(1, 1)), r"routed_experts_mask must be uint8 \[3\], got uint8 \[2\]"),
        (
            with_experts(Tensor.of(np.ones((3, 1), np.uint8))),
            r"_mask must be .* got uint8 \[3, 1\]",
        ),
        (with_experts(ids([1, 1, 1])), r"_mask must be uint8 \[3\], got int32 \[3\]"),
        (with_experts(bytes_of(1, 1, 1), routed=None), "_mask is there, routed_experts is not"),
        (with_experts(None, bytes_of(1, 2, 3)), r"routed_experts has shape \(3,\), \[3, layers"),
        (with_experts(None, bomb("uint8", 3, 100, 50)), "at most 4096 for a token"),
        (with_score(segment=0), r"policy segments \[1\], got \[0\]"),
        (with_score(entropy=floats([1.0])), r"scores\[0\].entropy must be floats \[2\], got"),
        (with_score(entropy=replace(ids([1, 1]), dtype="float32", codec="zstd")), "float32 .2,."),
        (with_answer(token_ids=ids([3] * 6)), "segments hold 8 tokens, the model takes 7"),
        (with_score(reference_logprobs=floats([-1, NAN])), r"reference_logprobs\[1\] .* nan"),
        (scored((PROMPT, ANSWER, ANSWER)), r"policy segments \[1, 2\], got \[1\]"),
        (scored((ANSWER, PROMPT), (score(0, [-1, -1]),)), "nothing to condition on"),
        (scored((PROMPT, policy_segment([], [])), (score(1, []),)), "none by the policy"),
    ],
)
def test_bad_ones_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        validate(bad, VOCAB_SIZE, MAX_TOKENS)
