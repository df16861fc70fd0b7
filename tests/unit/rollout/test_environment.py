"""Environments in their child processes: what a step may return, and how one can go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from streams.errors import ConfigError
from tests import factories
from tests.unit.served.test_gate import until
from workers.rollout.environment import (
    Ends,
    EpisodeError,
    LostEpisodeError,
    PolicyTurn,
    Says,
    SuspectEpisodeError,
)
from workers.rollout.environment_process import Held
from workers.rollout.user_environment import UserEnvironment, UserEpisode
from workers.rollout.user_verifier import Function

DEADLINE_S = 120.0
PLAIN = """
import os, sys, time

class Game:
    def __init__(self, prompt, answer, metadata, *, word="no"):
        self.log, self.word, self.said = metadata.get("log", ""), word, []

    def step(self, completion, turn, is_last):
        self.said.append(completion)
        if completion == "hang":
            time.sleep(3600)
        if completion == "raise":
            raise KeyError("x")
        if completion == "exit":
            os._exit(3)
        if completion == "eat":
            return str(bytearray(1 << 30))
        if completion == "stop":
            return None
        if completion == "nonsense":
            return {"right": "yes"}
        if completion == "empty":
            return []
        if completion == "huge":
            return 1e30
        if completion == "tools":
            return [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]
        if completion == "extra":
            return {"role": "tool", "content": "a", "at": {1, 2}}
        if completion == "won" or is_last:
            return 0.5, {"turns": turn}
        return self.word + " " + ",".join(self.said)

    def close(self):
        if self.log:
            with open(self.log, "a") as file:
                file.write("closed\\n")
"""
SLOW = """
import asyncio, os

class Game:
    here = 0

    def __init__(self, prompt, answer, metadata):
        pass

    async def step(self, completion):
        Game.here += 1
        if completion == "exit":
            while Game.here < 2:
                await asyncio.sleep(0.001)
            os._exit(3)
        if completion == "hang":
            await asyncio.sleep(3600)
        while Game.here < 2:
            await asyncio.sleep(0.001)
        return completion
"""
World = Callable[..., UserEnvironment]


@pytest.fixture
def world(tmp_path: Path):
    """Makes environments of a source text, and closes them."""
    made: list[UserEnvironment] = []

    def make(source: str = PLAIN, *, must_reward: bool = False, **changes: Any) -> UserEnvironment:
        file = tmp_path / "game.py"
        file.write_text(source)
        values = {"timeout_s": 60.0, "processes": 1, "concurrency": 8, "memory_mb": 300}
        code = Function(name="Game", file=str(file), **{**values, **changes})
        made.append(UserEnvironment(code, must_reward=must_reward))
        return made[-1]

    yield make
    for one in made:
        one.close()


def drive(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, DEADLINE_S))


def turn(text: str, number: int = 1, *, is_last: bool = False) -> PolicyTurn:
    return PolicyTurn(number=number, is_last=is_last, text=text, token_ids=[5])


def begin(environment: UserEnvironment, name: str = "0/0/0", metadata: str = "{}") -> UserEpisode:
    return environment.begin(name, factories.prompt(metadata=metadata))


def test_an_episode_keeps_its_state_between_turns(world: World) -> None:
    """One object per sample: text goes on, a number with parts ends, None leaves it to others."""

    async def scenario() -> None:
        environment = world(options={"word": "yes"})
        one, other = begin(environment), begin(environment, "0/1/0")
        assert Says("yes a") == await one.step(turn("a"))
        assert Says("yes c") == await other.step(turn("c"))
        assert Says("yes a,b") == await one.step(turn("b", 2))
        ends = await one.step(turn("won", 3))
        assert isinstance(ends, Ends)
        assert ends.judgement is not None
        assert (0.5, {"turns": 3.0}) == (ends.judgement.reward, ends.judgement.parts)
        assert Ends(None) == await other.step(turn("stop", 2))
        last = await begin(environment, "0/2/0").step(turn("a", is_last=True))
        assert isinstance(last, Ends)

    drive(scenario())


def test_messages_of_several_roles_may_be_said(world: World) -> None:
    """A list of messages is passed on as it is."""

    async def scenario() -> None:
        said = await begin(world()).step(turn("tools"))
        assert isinstance(said, Says)
        assert "a\nb" == said.text
        assert ["tool", "user"] == [message["role"] for message in said.content]  # type: ignore[index]

    drive(scenario())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("raise", r"game.py:13: Game raised KeyError: 'x'"),
        ("eat", r"game.py:17: Game raised MemoryError"),
        ("nonsense", r"game.py:8 part 'right' is 'yes' of type str; .* text or messages to go on"),
        ("empty", r"game.py:8 returned a list that is not of messages"),
        ("extra", r"game.py:8 returned a message with a field that is not JSON"),
        ("huge", r"the reward must be finite and within 1e\+09"),
        ("stop", r"step returned None, and reward.verifier is `environment`"),
    ],
)
def test_what_is_no_answer_costs_its_own_sample(world: World, said: str, told: str) -> None:
    """The error names file and line; other episodes in the same process go on."""

    async def scenario() -> None:
        environment = world(must_reward=True)
        other, one = begin(environment, "1/0/0"), begin(environment)
        await other.step(turn("a"))
        with pytest.raises(EpisodeError, match=told) as raised:
            await one.step(turn(said))
        assert not isinstance(raised.value, LostEpisodeError)
        assert Says("no a,b") == await other.step(turn("b"))

    drive(scenario())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("hang", r"gave no answer within 1 s: it is at .*game.py:11"),
        ("exit", "died with status 3"),
    ],
)
def test_a_process_that_ends_costs_who_ended_it(world: World, said: str, told: str) -> None:
    """Its other episodes are lost, which lets them be attempted again in a new process."""

    async def scenario() -> None:
        environment = world(timeout_s=1.0 if said == "hang" else 60.0)
        other, one = begin(environment, "1/0/0"), begin(environment)
        await other.step(turn("a"))
        with pytest.raises(EpisodeError, match=told) as raised:
            await one.step(turn(said))
        assert not isinstance(raised.value, LostEpisodeError)
        with pytest.raises(LostEpisodeError):
            await other.step(turn("b"))
        again = await begin(environment, "1/0/1").step(turn("c"))
        assert Says("no c") == again

    drive(scenario())


def test_steps_of_an_async_class_run_side_by_side(world: World) -> None:
    """Each waits for the other: one at a time they would never end."""

    async def scenario() -> None:
        environment = world(SLOW)
        both = [begin(environment, f"0/{n}/0").step(turn(str(n))) for n in range(2)]
        assert [Says("0"), Says("1")] == await asyncio.gather(*both)

    drive(scenario())


def test_nobody_is_blamed_for_a_death_that_several_could_have_caused(world: World) -> None:
    """Of two steps in a process that ends, both are attempted again."""

    async def scenario() -> None:
        environment = world(SLOW)
        steps = [begin(environment, f"0/{n}/0").step(turn("exit")) for n in range(2)]
        found = await asyncio.gather(*steps, return_exceptions=True)
        assert [SuspectEpisodeError] * 2 == [type(error) for error in found]

    drive(scenario())


@pytest.mark.parametrize("said", ["hang", "exit"])
def test_who_waits_for_room_in_a_process_that_ends_is_not_to_blame(world: World, said: str) -> None:
    """Steps that were never sent are lost, not failed, however many stood in line."""

    async def scenario() -> None:
        environment = world(timeout_s=1.0 if said == "hang" else 60.0)
        steps = [begin(environment).step(turn(said))]
        steps += [begin(environment, f"{n}/0/0").step(turn("a")) for n in range(1, 4)]
        found = await asyncio.gather(*steps, return_exceptions=True)
        assert [EpisodeError, *[LostEpisodeError] * 3] == [type(error) for error in found]

    drive(scenario())


def test_a_process_that_is_ended_for_another_step_blames_none_that_is_under_way(
    world: World,
) -> None:
    """A step that does not let go ends its process; the rest are innocent, alone or not."""

    async def scenario() -> None:
        environment = world(SLOW)
        step = asyncio.create_task(begin(environment).step(turn("hang")))
        child = environment._homes[0].child
        await until(lambda: child._sent > 0, "its step is not under way")
        await asyncio.to_thread(child.end, "was ended because another call hung")
        with pytest.raises(LostEpisodeError, match="another call hung") as raised:
            await step
        assert LostEpisodeError is type(raised.value)

    drive(scenario())


def test_a_state_that_is_given_up_is_closed(world: World, tmp_path: Path) -> None:
    """By whoever leaves, and at the end of the worker by whoever is still there."""
    log = tmp_path / "log"
    metadata = f'{{"log": "{log}"}}'

    async def scenario() -> None:
        environment = world()
        one, other = begin(environment, metadata=metadata), begin(environment, "1/0/0", metadata)
        await one.step(turn("a"))
        await other.step(turn("a"))
        one.leave()
        one.leave()
        await until(log.exists, "it is not closed")
        assert "closed\n" == log.read_text()
        environment.close()
        assert "closed\nclosed\n" == log.read_text()

    drive(scenario())


def test_a_step_that_is_given_up_ends_before_its_object_is_closed(
    world: World, tmp_path: Path
) -> None:
    """By the cancellation of an `async def`, even where every call has its room taken."""
    log = tmp_path / "log"
    source = """
import asyncio

class Game:
    def __init__(self, prompt, answer, metadata):
        self.log = metadata["log"]

    def write(self, line):
        with open(self.log, "a") as file:
            file.write(line + "\\n")

    async def step(self, completion):
        self.write("begun")
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            self.write("ended")

    async def close(self):
        self.write("closed")
"""

    async def scenario() -> None:
        episode = begin(world(source, concurrency=1), metadata=f'{{"log": "{log}"}}')
        step = asyncio.create_task(episode.step(turn("a")))
        await until(log.exists, "its step is not under way")
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        episode.leave()
        await until(lambda: "closed" in log.read_text(), "it is not closed")
        assert ["begun", "ended", "closed"] == log.read_text().split()

    drive(scenario())


def test_a_close_that_overtakes_a_first_step_leaves_no_object() -> None:
    """Threads send in any order: a step that comes behind its close makes nothing."""

    class Game:
        made = 0

        def __init__(self, *_: object) -> None:
            Game.made += 1

        def step(self, completion: str) -> str:
            return completion

    spec = {"function": "Game", "file": "game.py", "options": {}}
    held = Held(Game, spec)
    start = {"prompt": "", "answer": "", "metadata": {}}
    step = {"step": "a", "start": start, "completion": "1", "extra": {}}
    assert {} == held.answer_plain({"close": ["a"]})
    assert "given up" in held.answer_plain(step)["error"]
    assert 0 == Game.made
    assert {"says": "1"} == held.answer_plain({**step, "step": "b"})
    assert 1 == Game.made


def test_episodes_are_spread_over_the_processes(world: World) -> None:
    """A second process is started for the second episode, and each keeps to its own."""
    source = PLAIN.replace(
        'return self.word + " " + ",".join(self.said)', "return str(os.getpid())"
    )

    async def scenario() -> None:
        environment = world(source, processes=2)
        one, other = begin(environment), begin(environment, "1/0/0")
        first, second = await one.step(turn("a")), await other.step(turn("a"))
        assert first != second
        assert [first, second] == [await one.step(turn("b")), await other.step(turn("b"))]

    drive(scenario())


# Its first process is made as it should be; the others do as `{later}` says.
ONCE = """
import os, time

LOG = {log!r}
if os.path.exists(LOG):
    {later}
open(LOG, "a").close()

class Game:
    def __init__(self, prompt, answer, metadata):
        pass

    def step(self, completion):
        return completion
"""


@pytest.mark.parametrize("later", ["raise OSError('no room')", "time.sleep(3600)"])
def test_a_process_that_cannot_be_added_costs_no_sample(
    world: World, tmp_path: Path, later: str
) -> None:
    """Whether it fails or hangs, episodes go on in the process that is there."""

    async def scenario() -> None:
        environment = world(ONCE.format(log=str(tmp_path / "log"), later=later), processes=2)
        environment.patience_s = 0.0 if "sleep" in later else DEADLINE_S
        for number in range(4):
            said = await begin(environment, f"{number}/0/0").step(turn("a"))
            assert Says("a") == said
        assert 1 == len(environment._homes)

    drive(scenario())


def test_a_start_outlives_the_sample_that_began_it(world: World, tmp_path: Path) -> None:
    """The process is there for others, and is closed with the environment."""
    source = ONCE.format(log=str(tmp_path / "log"), later="time.sleep(0.1)")

    async def scenario() -> None:
        environment = world(source, processes=2)
        await begin(environment).step(turn("a"))
        step = asyncio.create_task(begin(environment, "1/0/0").step(turn("a")))
        await until(lambda: environment._starting is not None, "no process is started")
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await until(lambda: len(environment._homes) == 2, "the start was given up")

    drive(scenario())


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def Game(prompt): pass", "must be a class with a method `step"),
        ("class Game:\n    def step(self, completion): pass", "cannot be made with"),
        (
            "class Game:\n    def __init__(self, *a): pass\n    def step(self, a, b): pass",
            r"game.py:3: Game.step cannot be called with \(completion\)",
        ),
        ("class Other: pass", "has no .*'Game'"),
        ("import nothing_like_it", "game.py:1: ModuleNotFoundError"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_at_the_start(
    world: World, source: str, told: str
) -> None:
    """With file, line, and how to write it."""
    with pytest.raises(ConfigError, match=told):
        world(source)
