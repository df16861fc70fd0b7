"""Recorded sessions judged again: new outcomes, and how rewards and advantages would change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlstreams.debug.rejudge.rejudge import Grader, Rejudged, rejudge
from rlstreams.schemas.events import (
    ClosedGroups,
    Event,
    PartitionPosition,
    StepCompleted,
    Trajectory,
)
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import (
    CALLS,
    OUTCOMES,
    PROMPTS,
    STEPS,
    TRAJECTORIES,
    Topic,
)
from rlstreams.streams.run.run_log import BusLog
from rlstreams.streams.sessions.chain import main_chain, segments_of
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.reward import RewardSection
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox.reward import Judgement, RewardError, Sample, Verifier
from rlstreams.workers.trainer.learn.advantage import advantages_by
from tests.call_events import (
    answered,
    call_committed,
    outcome_reported,
    session_closed,
    session_opened,
)
from tests.factories import prompt, sample_ref, step_completed, trainer_started, trajectory
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.random_sessions import ids
from tests.unit.sessions.test_fold import folded
from tests.unit.streams.test_later_topics import recorded

SIZE = 4
BY = LossSection()


def session(number: int, *, kind: str = "ended") -> list[Event]:
    """Two calls; the second one says as many tokens as the sample's number plus 1."""
    of = {"session_id": f"7/{number}", "group_id": "7"}
    return [
        session_opened(sample=number, **of),
        call_committed(call_id="a", request_hash="a", **of),
        call_committed(
            call_id="b", request_hash="b", parent="a", ordinal=1, prompt_tokens=9, new_ids=ids([1]),
            segments=(answered(number + 1, start=200),), **of,
        ),
        session_closed(sample=number, kind=kind, **of),
    ]  # fmt: skip


def sample_of(number: int, reward: float) -> Trajectory:
    chain = main_chain(folded(*session(number)))
    segments = segments_of(chain)
    return trajectory(sample=number, reward=reward, segments=segments, routed_experts=None)


def step(rewards: Sequence[float]) -> StepCompleted:
    advantages = advantages_by(rewards, ["7"] * SIZE, BY).tolist()
    refs = [
        sample_ref(sample=n, reward=r, advantage=a)
        for n, (r, a) in enumerate(zip(rewards, advantages, strict=True))
    ]
    at = PartitionPosition(topic="scored-trajectories", partition=0, offset=0)
    return step_completed(
        1, samples=tuple(refs), masked=(), absent=(), closed=ClosedGroups(watermark=1),
        positions=(at,),
    )  # fmt: skip


def bus_of(rewards: Sequence[float], *extra: tuple[Topic, Event]) -> MemoryBus:
    """A run of one group whose samples were sessions, and one step with these rewards."""
    bus = MemoryBus(made_log("r"), "r")
    told: list[tuple[Topic, Event]] = [(STEPS, trainer_started()), (STEPS, step(rewards))]
    for number, reward in enumerate(rewards):
        told.append((PROMPTS, prompt(sample=number, group_size=SIZE, text=f"question {number}")))
        told += [(CALLS, event) for event in session(number)]
        said = outcome_reported(session_id=f"7/{number}", outcome_id=f"o{number}", reward=reward)
        told += [(OUTCOMES, said), (TRAJECTORIES, sample_of(number, reward))]
    bus.producer("w").commit([outgoing(topic, event) for topic, event in (*told, *extra)])
    return bus


def numbers(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def by_length(seen: list[Sample]) -> Verifier:
    """A grader that pays for each token of the last answer, and fails on those of two."""

    async def judge(sample: Sample) -> Judgement:
        seen.append(sample)
        if len(sample.token_ids) == 2:
            raise RewardError("no opinion on two tokens")
        return Judgement(reward=float(len(sample.token_ids)), parts={"length": 1.0}, note="counted")

    return Verifier(judge, require_stop=False)


def judged(bus: MemoryBus, seen: list[Sample] | None = None) -> Rejudged:
    grader = Grader(name="length", hash="h1", verifier=by_length([] if seen is None else seen))
    with BusLog(bus, "r") as log:
        return rejudge(log, grader, numbers, BY)


def test_rewards_and_advantages_as_they_would_have_been() -> None:
    seen: list[Sample] = []
    found = judged(bus_of([1.0, 0.0, 0.0, 1.0]), seen)
    assert [s.completion for s in seen] == ["200", "200 201", "200 201 202", "200 201 202 203"]
    assert [s.prompt for s in seen] == [f"question {n}" for n in range(SIZE)]
    assert [len(s.transcript) for s in seen] == [2] * SIZE
    rewards = [(o.sample[1], o.was, o.event.kind, o.event.reward) for o in found.outcomes]
    assert rewards == [
        (0, 1.0, "reward", 1.0),
        (1, 0.0, "grader", 0.0),
        (2, 0.0, "reward", 3.0),
        (3, 1.0, "reward", 4.0),
    ]
    assert found.num_changed == 2
    (changed,) = found.steps
    assert changed.is_exact
    # A grader that fails leaves the recorded reward: it is no 0.
    expected = advantages_by([1.0, 0.0, 3.0, 4.0], ["7"] * SIZE, BY).tolist()
    assert (list(changed.now), changed.num_changed) == (expected, SIZE)


def test_new_outcomes_replace_the_old_and_name_who_judged_what() -> None:
    first, second = judged(bus_of([1.0] * SIZE)), judged(bus_of([1.0] * SIZE))
    event = first.outcomes[0].event
    assert (event.supersedes, event.call_id, event.grader) == ("o0", "b", "length")
    assert (event.grader_hash, event.note, event.parts) == ("h1", "counted", {"length": 1.0})
    assert [o.event.outcome_id for o in first.outcomes] == [
        o.event.outcome_id for o in second.outcomes
    ]
    assert len({o.event.outcome_id for o in first.outcomes}) == SIZE


def test_a_step_with_another_way_to_its_advantages_says_so() -> None:
    bus = bus_of([1.0, 0.0, 0.0, 1.0])
    with BusLog(bus, "r") as log:
        other = LossSection(advantage="rloo")
        grader = Grader(name="length", hash="", verifier=by_length([]))
        (changed,) = rejudge(log, grader, numbers, other).steps
    assert not changed.is_exact


def test_failed_and_open_sessions_are_not_judged() -> None:
    of = {"session_id": "8/0", "group_id": "8"}
    more = [(CALLS, event) for event in session(9, kind="infrastructure")]
    opened = (CALLS, session_opened(sample=0, **of))
    found = judged(bus_of([1.0] * SIZE, *more, opened))
    assert (len(found.outcomes), found.num_unjudged, found.num_open) == (SIZE, 1, 1)


def test_an_answer_without_its_question_is_not_judged() -> None:
    found = judged(bus_of([1.0] * SIZE, *[(CALLS, event) for event in session(5)]))
    assert (found.outcomes[-1].event.kind, found.outcomes[-1].was) == ("grader", None)
    assert found.outcomes[-1].event.note == "the prompt of 7/5 is not in the log"


def test_equal_rewards_change_no_step() -> None:
    assert judged(bus_of([1.0, 2.0, 3.0, 4.0])).steps == []


def test_a_recording_and_a_verifier_of_the_configuration(tmp_path: Path) -> None:
    """Without a broker, by `[reward]` as another run has it."""
    bus = bus_of([1.0, 0.0, 0.0, 1.0])
    section = RewardSection(verifier="exact", require_stop=False)
    with recorded(bus, tmp_path) as log, make_verifier(section) as verifier:
        grader = Grader(name="exact", hash="", verifier=verifier)
        found = rejudge(log, grader, numbers, BY)
    assert [o.event.kind for o in found.outcomes] == ["reward"] * SIZE
    assert {o.event.reward for o in found.outcomes} == {0.0}
    assert found.steps[0].now == pytest.approx([0.0] * SIZE)
