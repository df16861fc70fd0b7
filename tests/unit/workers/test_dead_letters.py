"""What a dead letter says of the record that it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import Segment
from rlstreams.streams.log.record import Position, RawRecord
from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.dead_letters import MAX_DETAIL, Reason, refusal
from rlstreams.workers.loop.validation import check_prompt, check_trajectory
from tests import factories
from tests.factories import prompt, scored, trajectory
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog

CONTEXT = Context(
    config=RunConfig(),
    bus=MemoryBus(MemoryLog(), "run"),
    role="rollout",
    ordinal=1,
    instance="i",
)


def raw(topic: str = PROMPTS.name, name: bytes = b"", purpose: bytes = b"train") -> RawRecord:
    return RawRecord(
        position=Position(topic, 2, 40),
        offsets=(40,),
        key=b"k",
        value=b"bytes",
        headers={"rlstreams-id": name, "rlstreams-purpose": purpose},
    )


def test_bytes_that_are_no_event_name_no_sample() -> None:
    """Whatever their headers say: else anybody could close any group."""
    letter = refusal(CONTEXT, raw(name=b"17/3/0", purpose=b"evaluate"), None, DecodeError("junk"))
    assert ("", -1, "train") == (letter.group_id, letter.sample, letter.purpose)
    assert ("decode", False, -1) == (letter.reason, letter.permanent, letter.row)
    assert ("rollout-1", "prompts", 2, 40) == (
        letter.worker,
        letter.origin_topic,
        letter.origin_partition,
        letter.origin_offset,
    )
    assert (b"k", b"bytes") == (letter.key, letter.value)


@pytest.mark.parametrize(
    ("topic", "event", "permanent"),
    [
        (PROMPTS.name, prompt(), True),
        (TRAJECTORIES.name, prompt(), False),
        (TRAJECTORIES.name, trajectory(), False),
        (SCORED.name, scored(), False),
    ],
)
def test_only_what_is_wrong_with_a_prompt_is_permanent(
    topic: str, event: Any, *, permanent: bool
) -> None:
    """An answer that cannot be says nothing against its row."""
    letter = refusal(CONTEXT, raw(topic), event, ValueError("x" * 9000))
    assert ("7", 1, 3, permanent) == (
        letter.group_id,
        letter.sample,
        letter.row,
        letter.permanent,
    )
    assert (Reason.VALIDATION, MAX_DETAIL) == (letter.reason, len(letter.detail))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"group_id": "abc"}, "group_id must be an issue number"),
        ({"group_id": "007"}, "group_id must be an issue number"),
        ({"group_id": "e1-1"}, "group_id must be an issue number"),
        ({"purpose": "evaluate"}, "group_id must be"),
        ({"purpose": "test"}, "purpose must be one of"),
        ({"sample": 4}, "sample must be below group_size 4, got 4"),
        ({"metadata": "[1]"}, "metadata must be a JSON object"),
        ({"metadata": "{"}, "Expecting property name"),
    ],
)
def test_a_prompt_that_no_run_issues_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_prompt(prompt(**changes))


def test_a_trajectory_of_no_group_is_refused() -> None:
    """The trainer could close no such group."""
    with pytest.raises(ValueError, match="group_id must be an issue number"):
        check_trajectory(trajectory(group_id="group"), 1000, 100)


@pytest.mark.parametrize(
    "wrong", [{"policy_version": 1}, {"behavior_logprobs": factories.float32s(4)}]
)
def test_tokens_that_no_policy_sampled_may_not_claim_one(wrong: dict[str, Any]) -> None:
    """A version or log-probs there would be a mistake of whoever wrote the event."""
    said = Segment(author="environment", token_ids=factories.int32s(4))
    turns = (factories.prompt_segment(), factories.policy_segment())
    check_trajectory(trajectory(segments=(*turns, said, turns[1])), 1000, 100)
    segments = (*turns, replace(said, **wrong), turns[1])
    with pytest.raises(ValueError, match=r"segments\[2\] is by environment, and has"):
        check_trajectory(trajectory(segments=segments), 1000, 100)
