"""Environments in their child processes: what a step may return, and how one can go wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.rollout.environment import Ends, EpisodeError, LostEpisodeError, Says
from rlstreams.workers.rollout.environment_process import Held
from tests.processes.rollout.games import PLAIN, SLOW, World, begin, drive, turn
from tests.waiting import until


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


def test_a_step_is_told_what_it_has_parameters_for(world: World) -> None:
    """The text with its special tokens too: a call of a tool may be one."""

    async def scenario() -> None:
        assert Says("look<eos> of 1") == await begin(world()).step(turn("look"))

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


def test_steps_of_an_async_class_run_side_by_side(world: World) -> None:
    """Each waits for the other: one at a time they would never end."""

    async def scenario() -> None:
        environment = world(SLOW)
        both = [begin(environment, f"0/{n}/0").step(turn(str(n))) for n in range(2)]
        assert [Says("0"), Says("1")] == await asyncio.gather(*both)

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


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def Game(prompt): pass", "must be a class with a method `step"),
        ("class Game:\n    def step(self, completion): pass", "cannot be made with"),
        (
            "class Game:\n    def __init__(self, *a): pass\n    def step(self, a, b): pass",
            r"game.py:3: Game.step cannot be called with \(completion\)",
        ),
        ("class Other: pass", r"game.py has no class 'Game' \(it has: Other\)"),
        ("class Gmae: pass\ndef f(): pass", r"\(it has: Gmae; did you mean 'Gmae'\?\)"),
        ("def other(): pass", r"game.py has no class 'Game' \(it has no class at all\)"),
        ("Game = 3", r"no class 'Game' \(that is 3, which cannot be called\)"),
        ("import nothing_like_it", "game.py:1: ModuleNotFoundError"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_at_the_start(
    world: World, source: str, told: str
) -> None:
    """With file, line, and how to write it."""
    with pytest.raises(ConfigError, match=told):
        world(source)
