"""Processes of environments that end, or cannot be added: whose fault, and who goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlstreams.workers.rollout import verifier_child
from rlstreams.workers.rollout.environment import (
    EpisodeError,
    LostEpisodeError,
    Says,
    SuspectEpisodeError,
)
from tests.processes.rollout.games import DEADLINE_S, PLAIN, SLOW, World, begin, drive, turn
from tests.waiting import until


def test_a_process_that_ends_costs_who_ended_it(world: World) -> None:
    """Its other episodes are lost, which lets them be attempted again in a new process."""

    async def scenario() -> None:
        environment = world()
        other, one = begin(environment, "1/0/0"), begin(environment)
        await other.step(turn("a"))
        with pytest.raises(EpisodeError, match="died with status 3") as raised:
            await one.step(turn("exit"))
        assert not isinstance(raised.value, LostEpisodeError)
        with pytest.raises(LostEpisodeError):
            await other.step(turn("b"))
        again = await begin(environment, "1/0/1").step(turn("c"))
        assert Says("no c") == again

    drive(scenario())


def test_a_plain_step_that_hangs_costs_itself_alone(world: World, tmp_path: Path) -> None:
    """It is broken off where it waits, its object is closed, and its neighbour keeps its state."""
    log = tmp_path / "log"
    metadata = f'{{"log": "{log}"}}'

    async def scenario() -> None:
        environment = world()
        other, one = begin(environment, "1/0/0"), begin(environment, metadata=metadata)
        assert Says("no a") == await other.step(turn("a"))
        environment._homes[0].child._timeout_s = 0.5
        told = r"gave no answer within 0\.5 s: it is at .*game.py:11"
        with pytest.raises(EpisodeError, match=told) as raised:
            await one.step(turn("hang"))
        assert not isinstance(raised.value, LostEpisodeError)
        one.leave()
        await until(log.exists, "it is not closed")
        environment._homes[0].child._timeout_s = DEADLINE_S
        assert Says("no a,b") == await other.step(turn("b", 2))

    drive(scenario())


def test_a_plain_step_that_does_not_let_go_ends_its_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is to blame still; its neighbour begins anew, in another process."""
    monkeypatch.setattr(verifier_child, "CANCEL_S", 0.2)
    source = (
        PLAIN.replace("time.sleep(3600)", "self.hang()")
        + """
    def hang(self):
        while True:
            try:
                time.sleep(3600)
            except BaseException:
                pass
"""
    )

    async def scenario() -> None:
        environment = world(source)
        other, one = begin(environment, "1/0/0"), begin(environment)
        await other.step(turn("a"))
        environment._homes[0].child._timeout_s = 0.2
        with pytest.raises(EpisodeError, match=r"gave no answer within 0\.2 s") as raised:
            await one.step(turn("hang"))
        assert not isinstance(raised.value, LostEpisodeError)
        with pytest.raises(LostEpisodeError, match="did not let go"):
            await other.step(turn("b"))
        assert Says("no c") == await begin(environment, "1/0/1").step(turn("c"))

    drive(scenario())


def test_nobody_is_blamed_for_a_death_that_several_could_have_caused(world: World) -> None:
    """Of two steps in a process that ends, both are attempted again."""

    async def scenario() -> None:
        environment = world(SLOW)
        steps = [begin(environment, f"0/{n}/0").step(turn("exit")) for n in range(2)]
        found = await asyncio.gather(*steps, return_exceptions=True)
        assert [SuspectEpisodeError] * 2 == [type(error) for error in found]

    drive(scenario())


def test_who_waits_for_room_in_a_process_that_ends_is_not_to_blame(world: World) -> None:
    """Steps that were never sent are lost, not failed, however many stood in line."""

    async def scenario() -> None:
        environment = world()
        steps = [begin(environment).step(turn("exit"))]
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
