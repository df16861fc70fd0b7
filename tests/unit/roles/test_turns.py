"""Samples of several turns in the rollout role: what is logged, what an environment costs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstreams.schemas.events import NO_VERSION, DeadLetter, Prompt, Trajectory
from rlstreams.streams.log.topics import DEAD_LETTERS, TRAJECTORIES
from rlstreams.workers.engines.base import SampleRequest
from rlstreams.workers.engines.decode import Generation
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.loop.validation import check_trajectory
from rlstreams.workers.rollout.next_turn import NextTurn
from rlstreams.workers.rollout.turns import Turns
from rlstreams.workers.rollout.worker import make_worker
from rlstreams.workers.sandbox.environment import Ends, PolicyTurn, Says
from rlstreams.workers.sandbox.reward import Judgement
from rlstreams.workers.sandbox.user_code import LostCallError, SuspectCallError, UserCodeError
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import EOS, MAX_TOKENS, FakeEngine
from tests.unit.roles.stand import Stand, make_sampler, tick_until

Reply = Callable[[str, PolicyTurn], Says | Ends]


class EndsTurns(FakeEngine):
    """Ends each turn behind `length` tokens; stands still once it has sampled `stands_at`."""

    def __init__(self, *, length: int = 3, stands_at: int = -1) -> None:
        super().__init__()
        self.length = length
        self.stands_at = stands_at
        self.requests: list[SampleRequest] = []
        decoder: Any = self._scheduler._decoder
        self._advance, decoder._advance = decoder._advance, self._end

    def generate(self, request: SampleRequest) -> Any:
        self.requests.append(request)
        return super().generate(request)

    def _end(self, rows: list[Generation]) -> None:
        self._advance(rows)
        for row in rows:
            if len(row.token_ids) - row.request.prompt_tokens == self.length:
                row.token_ids[-1] = EOS
        self._scheduler._paused |= self.num_sampled == self.stands_at


class Scripted:
    """An environment in this process that answers by a function of the episode's name."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.begun: list[str] = []
        self.left: list[str] = []
        self.is_closed = False

    def begin(self, name: str, prompt: Prompt) -> ScriptedEpisode:
        self.begun.append(name)
        return ScriptedEpisode(self, name)

    def close(self) -> None:
        self.is_closed = True


class ScriptedEpisode:
    def __init__(self, environment: Scripted, name: str) -> None:
        self._environment, self._name = environment, name

    async def step(self, turn: PolicyTurn) -> Says | Ends:
        await asyncio.sleep(0)
        return self._environment.reply(self._name, turn)

    def leave(self) -> None:
        self._environment.left.append(self._name)


def hint_once(_: str, turn: PolicyTurn) -> Says | Ends:
    """Two tokens, and the second turn earns its number."""
    if turn.number == 1:
        return Says("1011")
    return Ends(Judgement(reward=float(turn.number), parts={"turns": 2.0}))


def begun(
    folder: Path,
    engine: FakeEngine,
    environment: Scripted,
    *groups: str,
    max_turns: int = 4,
    **of_sampler: Any,
) -> tuple[Stand, StageLoop]:
    """A worker with one sample of each group."""
    stand = Stand(folder)
    stand.publish(0)
    context = stand.context("rollout")
    sampler = make_sampler(stand, engine)
    next_turn = NextTurn(sampler.tokenizer, "tool", vocab_size=engine.vocab_size)
    turns = Turns(environment=environment, next_turn=next_turn, max_turns=max_turns)
    sampler = dataclasses.replace(sampler, turns=turns, **of_sampler)
    for group in groups or "0":
        stand.issue(group, 1)
    return stand, make_worker(context, context.bus, engine, FileWeightChannel(), sampler)


def played(stand: Stand, rollout: StageLoop, num: int = 1) -> list[Trajectory]:
    """The trajectories, once there are so many; the role is closed."""
    tick_until(rollout, lambda: len(stand.read(TRAJECTORIES.name, Trajectory)) == num)
    rollout.close()
    return stand.read(TRAJECTORIES.name, Trajectory)


def test_a_sample_goes_from_policy_to_environment_and_back(tmp_path: Path) -> None:
    """Segments tell who wrote what; only the policy's have a version, log-probs and a finish."""
    engine, environment = EndsTurns(), Scripted(hint_once)
    stand, rollout = begun(tmp_path, engine, environment)
    (trajectory,) = played(stand, rollout)
    check_trajectory(trajectory, engine.vocab_size, engine.max_tokens)
    assert ["prompt", "policy", "environment", "policy"] == [s.author for s in trajectory.segments]
    _, first, said, second = trajectory.segments
    assert (NO_VERSION, "", "", None, "") == (
        said.policy_version,
        said.weight_hash,
        said.load_id,
        said.behavior_logprobs,
        said.finish_reason,
    )
    assert [0, 0] == [s.policy_version for s in (first, second)]
    assert ["stop", "stop"] == [s.finish_reason for s in (first, second)]
    assert (2.0, {"turns": 2.0}) == (trajectory.reward, trajectory.reward_parts)
    assert environment.begun == environment.left == ["0/0/0"]
    assert environment.is_closed


def test_tokens_that_were_sampled_are_what_the_next_turn_begins_with(tmp_path: Path) -> None:
    """The second request holds the first turn's own ids, and counts all of them as given."""
    engine = EndsTurns()
    stand, rollout = begun(tmp_path, engine, Scripted(hint_once))
    (trajectory,) = played(stand, rollout)
    ids = [segment.token_ids.numpy() for segment in trajectory.segments]
    first, second = engine.requests
    assert ids[0].tolist() == first.token_ids.tolist()
    assert np.concatenate(ids[:3]).tolist() == second.token_ids.tolist()
    assert [3, len(second.token_ids)] == [first.prompt_tokens, second.prompt_tokens]
    assert first.sample_id == second.sample_id
    assert first.group_id == second.group_id


def test_a_pull_in_the_second_turn_ends_a_segment_and_not_the_turn(tmp_path: Path) -> None:
    """Versions are of segments; the environment's tokens between them have none."""
    engine = EndsTurns(stands_at=4)
    stand, rollout = begun(tmp_path, engine, Scripted(hint_once))
    tick_until(rollout, lambda: engine.num_sampled == 4)
    stand.publish(1)
    tick_until(rollout, lambda: engine.policy_version == 1)
    engine._post(engine._scheduler.resume)
    (trajectory,) = played(stand, rollout)
    assert [("prompt", -1), ("policy", 0), ("environment", -1), ("policy", 0), ("policy", 1)] == [
        (s.author, s.policy_version) for s in trajectory.segments
    ]
    assert "policy_changed" == trajectory.segments[3].finish_reason
    assert 3 == sum(len(s.token_ids) for s in trajectory.segments[3:])


def test_an_aborted_request_is_resumed_in_the_turn_where_it_was(tmp_path: Path) -> None:
    """Neither the first turn nor the environment's answer is made again."""
    engine, environment = EndsTurns(stands_at=4), Scripted(hint_once)
    stand, rollout = begun(tmp_path, engine, environment)
    tick_until(rollout, lambda: engine.num_sampled == 4)
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    (trajectory,) = played(stand, rollout)
    assert 3 == sum(len(s.token_ids) for s in trajectory.segments[3:])
    assert ["0/0/0"] == environment.begun
    _, second, third = engine.requests
    assert second.prompt_tokens == third.prompt_tokens == len(third.token_ids) - 1


def test_a_turn_that_is_cut_ends_the_sample(tmp_path: Path) -> None:
    """Its environment is not asked; the verifier judges, which knows that it was cut."""
    engine, environment = FakeEngine(), Scripted(hint_once)
    stand, rollout = begun(tmp_path, engine, environment)
    (trajectory,) = played(stand, rollout)
    assert ["prompt", "policy"] == [s.author for s in trajectory.segments]
    assert "length" == trajectory.segments[-1].finish_reason
    assert {"length": trajectory.reward} == trajectory.reward_parts
    assert ["0/0/0"] == environment.left


def test_turns_are_bounded_by_their_number_and_by_the_room(tmp_path: Path) -> None:
    """The last word is the policy's; then the verifier judges its last turn."""
    for max_turns, longest in ((2, 10), (100, MAX_TOKENS)):
        engine = EndsTurns()
        talks = Scripted(lambda name, turn: Says("1011"))
        stand, rollout = begun(tmp_path / str(max_turns), engine, talks, max_turns=max_turns)
        (trajectory,) = played(stand, rollout)
        assert "policy" == trajectory.segments[-1].author
        num_turns = sum(s.author == "policy" for s in trajectory.segments)
        assert min(max_turns, num_turns) == num_turns
        assert {"length": trajectory.reward} == trajectory.reward_parts
        num_tokens = sum(len(s.token_ids) for s in trajectory.segments)
        assert longest - 6 <= num_tokens - 3 * (max_turns == 2) <= longest + 3


def test_a_text_far_too_long_is_no_room_and_is_not_tokenised(tmp_path: Path) -> None:
    """It would hold up every other sample: half a surrogate pair shows that nobody tried."""
    engine = EndsTurns()
    talks = Scripted(lambda name, turn: Says("1" * 32 * MAX_TOKENS + "\ud800"))
    stand, rollout = begun(tmp_path, engine, talks)
    (trajectory,) = played(stand, rollout)
    assert ["prompt", "policy"] == [s.author for s in trajectory.segments]


def test_an_environment_that_fails_costs_its_sample(tmp_path: Path) -> None:
    """A dead letter names it; its siblings go on."""

    def reply(name: str, turn: PolicyTurn) -> Says | Ends:
        if name.startswith("1/"):
            raise UserCodeError("environment game.py:7 raised KeyError: '\ud800'")
        return hint_once(name, turn)

    environment = Scripted(reply)
    stand, rollout = begun(tmp_path, EndsTurns(), environment, *"012")
    assert {"0", "2"} == {t.group_id for t in played(stand, rollout, 2)}
    (letter,) = stand.read(DEAD_LETTERS.name, DeadLetter)
    assert ("1", 0, "environment", False) == (
        letter.group_id,
        letter.sample,
        letter.reason,
        letter.permanent,
    )
    assert "environment game.py:7 raised KeyError: '\\ud800'" == letter.detail
    assert sorted(environment.begun) == sorted(environment.left)


@pytest.mark.parametrize(
    ("kind", "num_lost", "num_begun"),
    [(SuspectCallError, 1, 2), (SuspectCallError, 2, 2), (LostCallError, 5, 6)],
)
def test_a_lost_state_begins_the_sample_anew(
    tmp_path: Path, kind: type[LostCallError], num_lost: int, num_begun: int
) -> None:
    """From the prompt; only one that may be to blame runs out of attempts, and is set aside."""

    def reply(name: str, turn: PolicyTurn) -> Says | Ends:
        if turn.number == 2 and int(name.rpartition("/")[2]) < num_lost:
            raise kind("environment game.py died with status 3")
        return hint_once(name, turn)

    environment = Scripted(reply)
    stand, rollout = begun(tmp_path, EndsTurns(), environment)

    def ended() -> list[Trajectory | DeadLetter]:
        letters = stand.read(DEAD_LETTERS.name, DeadLetter)
        return [*stand.read(TRAJECTORIES.name, Trajectory), *letters]

    tick_until(rollout, lambda: len(ended()) == 1)
    rollout.close()
    (found,) = ended()
    assert [f"0/0/{n}" for n in range(num_begun)] == environment.begun == environment.left
    if isinstance(found, Trajectory):
        assert (num_lost, 4) == (found.attempt, len(found.segments))
    else:
        assert (2, "environment") == (num_lost, found.reason)


class Hangs(Scripted):
    """Never answers."""

    def begin(self, name: str, prompt: Prompt) -> ScriptedEpisode:
        episode = super().begin(name, prompt)

        async def step(turn: PolicyTurn) -> Says | Ends:
            await asyncio.Event().wait()
            raise AssertionError

        episode.step = step  # type: ignore[method-assign]
        return episode


def test_a_sample_that_is_given_up_is_left_by_its_environment(tmp_path: Path) -> None:
    """A rebalance in the middle of an episode publishes nothing of it."""
    engine, environment = EndsTurns(), Hangs(hint_once)
    stand, rollout = begun(tmp_path, engine, environment)
    tick_until(rollout, lambda: engine.num_sampled == 3)
    stage: Any = rollout._stage
    stage.give_up({one.raw.partition for one in stage._running.values()})
    tick_until(rollout, lambda: bool(environment.left))
    tick_until(rollout, lambda: stage.num_open == 0)
    rollout.close()
    assert [] == stand.read(TRAJECTORIES.name, Trajectory)
    assert [] == stand.read(DEAD_LETTERS.name, DeadLetter)
