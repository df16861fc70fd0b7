"""Environments: objects with state, and what becomes of it when a process ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlstreams.workers.sandbox.environment import Ends, Says
from rlstreams.workers.sandbox.user_code import LostCallError, SuspectCallError, UserCodeError
from tests.processes.sandbox.games import DEADLINE_S, SLOW, World, begin, turn
from tests.waiting import until


async def test_an_episode_keeps_its_state_between_turns(world: World) -> None:
    """One object per sample: text goes on, a number with parts ends, None leaves it to others."""
    environment = world(options={"word": "yes"})
    one, other = begin(environment), begin(environment, "0/1/0")
    assert Says("yes a") == await one.step(turn("a"))
    assert Says("yes c") == await other.step(turn("c"))
    assert Says("yes a,b") == await one.step(turn("b", 2))
    ends = await one.step(turn("won", 3))
    assert isinstance(ends, Ends)
    assert (0.5, {"turns": 3.0}) == (ends.judgement.reward, ends.judgement.parts)
    assert Ends(None) == await other.step(turn("stop", 2))
    last = await begin(environment, "0/2/0").step(turn("a", is_last=True))
    assert isinstance(last, Ends)


async def test_messages_of_several_roles_may_be_said(world: World) -> None:
    said = await begin(world()).step(turn("tools"))
    assert isinstance(said, Says)
    assert "a\nb" == said.text
    assert ["tool", "user"] == [message["role"] for message in said.content]  # type: ignore[index]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("empty", r"game.py:8 returned a list that is not of messages"),
        ("extra", r"game.py:8 returned what is not JSON: .*set"),
        ("stop", r"step returned None, and reward.verifier is `environment`"),
    ],
)
async def test_what_is_no_answer_costs_its_own_sample(
    world: World, said: str, message: str
) -> None:
    """Other episodes in the same process keep their state."""
    environment = world(must_reward=True)
    other, one = begin(environment, "1/0/0"), begin(environment)
    await other.step(turn("a"))
    with pytest.raises(UserCodeError, match=message) as raised:
        await one.step(turn(said))
    assert UserCodeError is type(raised.value)
    assert Says("no a,b") == await other.step(turn("b"))


async def test_a_state_that_is_given_up_is_closed(world: World, tmp_path: Path) -> None:
    """By whoever leaves, and at the end of the worker by whoever is still there."""
    log = tmp_path / "log"
    metadata = f'{{"log": "{log}"}}'
    environment = world()
    one, other = begin(environment, "0/0/0", metadata), begin(environment, "0/1/0", metadata)
    await one.step(turn("a"))
    await other.step(turn("a"))
    one.leave()
    one.leave()
    # The file is there before the line is in it.
    await until(lambda: log.exists() and log.read_text() != "", "it is not closed")
    assert "closed\n" == log.read_text()
    environment.close()
    assert "closed\nclosed\n" == log.read_text()


async def test_a_step_that_is_given_up_ends_before_its_object_is_closed(
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
    episode = begin(world(source, concurrency=1), metadata=f'{{"log": "{log}"}}')
    step = asyncio.create_task(episode.step(turn("a")))
    await until(log.exists, "its step is not under way")
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    episode.leave()
    await until(lambda: "closed" in log.read_text(), "it is not closed")
    assert ["begun", "ended", "closed"] == log.read_text().split()


async def test_episodes_are_spread_over_the_processes(world: World) -> None:
    """A second process is started for the second episode, and each keeps to its own."""
    environment = world(processes=2)
    one, other = begin(environment), begin(environment, "1/0/0")
    first, second = await one.step(turn("look")), await other.step(turn("look"))
    assert first != second
    assert [first, second] == [await one.step(turn("look")), await other.step(turn("look"))]


async def test_a_process_that_ends_costs_who_ended_it(world: World) -> None:
    """Its other episodes are lost, which lets them be attempted again in a new process."""
    environment = world()
    other, one = begin(environment, "1/0/0"), begin(environment)
    await other.step(turn("a"))
    with pytest.raises(UserCodeError, match="died with status 3") as raised:
        await one.step(turn("exit"))
    assert UserCodeError is type(raised.value)
    with pytest.raises(LostCallError):
        await other.step(turn("b"))
    assert Says("no c") == await begin(environment, "1/0/1").step(turn("c"))


async def test_a_plain_step_that_hangs_costs_itself_alone(world: World, tmp_path: Path) -> None:
    """It is broken off where it waits, its object is closed, and its neighbour keeps its state."""
    log = tmp_path / "log"
    environment = world()
    other = begin(environment, "1/0/0")
    one = begin(environment, metadata=f'{{"log": "{log}"}}')
    assert Says("no a") == await other.step(turn("a"))
    (only,) = environment.sandbox.processes
    only.timeout_s = 0.5
    with pytest.raises(UserCodeError, match=r"within 0\.5 s: it is at .*game.py:11") as raised:
        await one.step(turn("hang"))
    assert UserCodeError is type(raised.value)
    one.leave()
    await until(log.exists, "it is not closed")
    only.timeout_s = DEADLINE_S
    assert Says("no a,b") == await other.step(turn("b", 2))


async def test_nobody_is_blamed_for_a_death_that_several_could_have_caused(world: World) -> None:
    """Of two steps in a process that ends, both are attempted again."""
    environment = world(SLOW)
    steps = [begin(environment, f"0/{n}/0").step(turn("exit")) for n in range(2)]
    found = await asyncio.gather(*steps, return_exceptions=True)
    assert [SuspectCallError] * 2 == [type(error) for error in found]


async def test_who_waits_for_room_in_a_process_that_ends_is_not_to_blame(world: World) -> None:
    """Steps that were never sent are lost, not failed, however many stood in line."""
    environment = world()
    steps = [begin(environment).step(turn("exit"))]
    steps += [begin(environment, f"{n}/0/0").step(turn("a")) for n in range(1, 4)]
    found = await asyncio.gather(*steps, return_exceptions=True)
    assert [UserCodeError, *[LostCallError] * 3] == [type(error) for error in found]


async def test_a_process_that_is_ended_for_another_step_blames_none_that_is_under_way(
    world: World,
) -> None:
    """A step that does not let go ends its process; the rest are innocent, alone or not."""
    environment = world(SLOW)
    step = asyncio.create_task(begin(environment).step(turn("wait")))
    (only,) = environment.sandbox.processes
    await until(lambda: bool(only._calls), "its step is not under way")
    await environment.sandbox.within(only.end("was ended because another call hung"))
    with pytest.raises(LostCallError, match="another call hung") as raised:
        await step
    assert LostCallError is type(raised.value)


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
async def test_a_process_that_cannot_be_added_costs_no_sample(
    world: World, tmp_path: Path, later: str
) -> None:
    """Whether it fails or hangs, episodes go on in the process that is there."""
    environment = world(ONCE.format(log=str(tmp_path / "log"), later=later), processes=2)
    environment.sandbox.patience_s = 0.0 if "sleep" in later else DEADLINE_S
    for number in range(4):
        said = await begin(environment, f"{number}/0/0").step(turn("a"))
        assert Says("a") == said
    assert 1 == len(environment.sandbox.processes)


async def test_a_start_outlives_the_sample_that_began_it(world: World, tmp_path: Path) -> None:
    """The process is there for others, and is closed with the environment."""
    source = ONCE.format(log=str(tmp_path / "log"), later="time.sleep(0.1)")
    environment = world(source, processes=2)
    sandbox = environment.sandbox
    await begin(environment).step(turn("a"))
    step = asyncio.create_task(begin(environment, "1/0/0").step(turn("a")))
    await until(lambda: sandbox._starting is not None, "no process is started")
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await until(lambda: len(sandbox.processes) == 2, "the start was given up")
