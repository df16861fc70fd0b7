"""Sessions whose graders speak after the end: the prompt waits, the agent does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlstreams.schemas.events import (
    DeadLetter,
    OutcomeReported,
    SessionClosed,
    SessionOpened,
    Trajectory,
)
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import CALLS, DEAD_LETTERS, OUTCOMES, PROMPTS, TRAJECTORIES
from rlstreams.workers.agents.agent import Ending
from rlstreams.workers.config.agents import OutcomeSection
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.rollout.worker import RolloutStage
from tests.call_events import outcome_reported
from tests.unit.roles.sessions_stand import Client, ScriptedAgent, recorded, worker_of
from tests.unit.roles.stand import Stand, tick_until
from tests.unit.roles.test_turns import EndsTurns


class Waiting:
    """A sample whose session waits for `human`; workers come and go."""

    def __init__(self, folder: Path, deadline_s: float = 60.0, num: int = 1) -> None:
        self.stand = Stand(folder)
        outcome = OutcomeSection(wait_for=("human",), deadline_s=deadline_s)
        self.stand.config = replace(self.stand.config, outcome=outcome)
        self.stand.publish(0)
        self.stand.issue("0", num)
        self.agent = ScriptedAgent(self.script)
        self.during: Callable[[], None] = lambda: None
        self.pen = self.stand.bus().producer("human")

    async def script(self, client: Client) -> None:
        await client.say("1")
        self.during()
        await client.say("10")

    def worker(self) -> StageLoop:
        return worker_of(self.stand, EndsTurns(), self.agent)

    def say(self, reward: float = 0.5, **changes: Any) -> None:
        values = {"session_id": "0/0", "group_id": "0", "grader": "human", **changes}
        event = outcome_reported(reward=reward, **values)
        self.pen.commit([outgoing(OUTCOMES, event, partition=0)])

    @property
    def closed(self) -> list[SessionClosed]:
        return self.stand.read(CALLS.name, SessionClosed)

    @property
    def trajectories(self) -> list[Trajectory]:
        return self.stand.read(TRAJECTORIES.name, Trajectory)

    @property
    def letters(self) -> list[DeadLetter]:
        return self.stand.read(DEAD_LETTERS.name, DeadLetter)


def test_the_sample_is_written_when_the_grader_has_spoken(tmp_path: Path) -> None:
    """Its close is in the log before; its prompt is not done until then."""
    run = Waiting(tmp_path)
    loop = run.worker()
    tick_until(loop, lambda: len(run.closed) == 1)
    for _ in range(5):
        loop.tick()
    assert (run.trajectories, run.letters) == ([], [])
    assert loop.is_idle
    run.say(0.25, parts={"form": 1.0}, note="neat")
    tick_until(loop, lambda: len(run.trajectories) == 1)
    loop.close()
    (made,) = run.trajectories
    assert (made.reward, made.reward_parts, made.reward_note) == (0.25, {"form": 1.0}, "neat")
    (opened,) = run.stand.read(CALLS.name, SessionOpened)
    assert opened.at_ms == made.started_at_ms
    assert len(run.agent.starts) == 1
    graders = {o.grader for o in run.stand.read(OUTCOMES.name, OutcomeReported)}
    assert graders == {"human", "length"}  # what the verifier says is on record, too


def test_whoever_takes_over_waits_on_and_starts_no_agent(tmp_path: Path) -> None:
    """However often; and once it is written, nobody writes it again."""
    run = Waiting(tmp_path)
    for _ in range(2):
        loop = run.worker()
        tick_until(loop, lambda: len(run.closed) == 1)
        loop.tick()
        loop.close()
    run.say()
    loop = run.worker()
    tick_until(loop, lambda: len(run.trajectories) == 1)
    loop.close()
    again = run.worker()
    for _ in range(20):
        again.tick()
    again.close()
    assert (len(run.trajectories), len(run.closed), len(run.agent.starts)) == (1, 1, 1)
    assert len(recorded(run.stand).calls) == 2


def test_an_outcome_that_came_before_the_end_counts(tmp_path: Path) -> None:
    run = Waiting(tmp_path)
    run.during = run.say
    loop = run.worker()
    tick_until(loop, lambda: len(run.trajectories) == 1)
    loop.close()
    assert run.trajectories[0].reward == 0.5


def test_a_grader_that_names_a_call_ends_the_sample_there(tmp_path: Path) -> None:
    run = Waiting(tmp_path)
    loop = run.worker()
    tick_until(loop, lambda: len(run.closed) == 1)
    first = recorded(run.stand).calls[0]
    run.say(call_id=first.call_id)
    tick_until(loop, lambda: len(run.trajectories) == 1)
    loop.close()
    assert [s.author for s in run.trajectories[0].segments] == ["prompt", "policy"]


def test_what_others_say_of_others_changes_nothing(tmp_path: Path) -> None:
    """Of a session that is not there, by a grader that nobody waits for, from the future, twice,
    and when the sample is written: it is recorded, and no more."""
    run = Waiting(tmp_path)
    loop = run.worker()
    tick_until(loop, lambda: len(run.closed) == 1)
    run.say(0.1, session_id="9/9", group_id="9", outcome_id="a")
    run.say(0.2, grader="nobody", outcome_id="b")
    for _ in range(5):
        loop.tick()
    assert run.trajectories == []
    run.say(0.25, outcome_id="c", at_ms=2**52)
    run.say(0.75, outcome_id="c")
    tick_until(loop, lambda: len(run.trajectories) == 1)
    run.say(1.0, outcome_id="d")
    for _ in range(5):
        loop.tick()
    loop.close()
    assert ([0.25], []) == ([one.reward for one in run.trajectories], run.letters)


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    """The time counts from the close; what comes later changes nothing."""
    run = Waiting(tmp_path, deadline_s=0.3)
    loop = run.worker()
    tick_until(loop, lambda: len(run.letters) == 1)
    run.say()
    for _ in range(5):
        loop.tick()
    loop.close()
    assert run.trajectories == []
    assert (run.letters[0].reason, run.letters[0].detail) == ("reward", "no outcome by human")
    kinds = [(o.grader, o.kind) for o in run.stand.read(OUTCOMES.name, OutcomeReported)]
    assert ("human", "expired") in kinds


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        ({"kind": "grader", "note": "away"}, "human: grader away"),
        ({"call_id": "z"}, "session 0/0 has no call z"),
        ({"reward": float("inf")}, "the reward must be finite"),
        ({"parts": {"form": float("nan")}}, "part 'form' of the reward must be finite"),
    ],
)
def test_what_cannot_be_a_reward_is_a_dead_letter(
    tmp_path: Path, said: dict[str, Any], detail: str
) -> None:
    run = Waiting(tmp_path)
    loop = run.worker()
    tick_until(loop, lambda: len(run.closed) == 1)
    run.say(**said)
    tick_until(loop, lambda: len(run.letters) == 1)
    loop.close()
    assert detail in run.letters[0].detail
    assert run.trajectories == []


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_said_of_a_sample_that_was_set_aside_is_kept_by_nobody(
    tmp_path: Path, *, fails: bool
) -> None:
    """Its session failed, or nobody spoke in time: graders go on to speak of it for days."""
    run = Waiting(tmp_path, deadline_s=0.3)
    if fails:
        run.agent.script = _fails
    loop = run.worker()
    tick_until(loop, lambda: len(run.letters) == 1)
    for number in range(3):
        run.say(outcome_id=str(number))
    stage: Any = loop._stage
    late = stage._player.late
    tick_until(loop, lambda: _is_read(run, late))
    loop.close()
    assert not late._said.sessions


async def _fails(client: Client) -> Ending:
    await client.say("1")
    return Ending(is_failed=True, detail="broke")


def _is_read(run: Waiting, late: Any) -> bool:
    (at,) = late._reader.positions().values()
    return bool(at >= len(run.stand.read(OUTCOMES.name, OutcomeReported)))


def test_a_partition_that_goes_away_is_forgotten_and_its_new_owner_waits(tmp_path: Path) -> None:
    """Two workers: what the first one has waiting is decided by the second."""
    run = Waiting(tmp_path)
    first = run.worker()
    stage = stage_of(first)
    tick_until(first, lambda: stage._player.num_late == 1)
    stage.give_up({Partition(PROMPTS.name, 0)})
    assert stage._player.num_late == 0
    run.say()
    for _ in range(5):
        first.tick()
    assert run.trajectories == []
    first.close()
    second = run.worker()
    tick_until(second, lambda: len(run.trajectories) == 1)
    second.close()
    assert len(run.agent.starts) == 1


def test_sessions_that_wait_leave_room_to_others_up_to_a_bound(tmp_path: Path) -> None:
    """Four times the engine's room wait, and no further prompt is taken until some are decided."""
    run = Waiting(tmp_path, num=64)
    loop = run.worker()
    stage = stage_of(loop)
    capacity = stage._engine.capacity
    bound = 6 * capacity
    assert bound < 64
    tick_until(loop, lambda: len(run.closed) >= bound)
    for _ in range(10):
        loop.tick()
    assert len(run.closed) == bound
    assert (stage.room(), stage.num_open) == (0, 0)
    for sample in range(64):
        run.say(session_id=f"0/{sample}", outcome_id=f"o{sample}")
    tick_until(loop, lambda: len(run.trajectories) == 64)
    loop.close()


def stage_of(loop: StageLoop) -> RolloutStage:
    stage = loop._stage
    assert isinstance(stage, RolloutStage)
    return stage
