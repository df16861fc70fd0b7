"""A system that has no room for one more process of user code: tried again, then said in words."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import DeadlineError
from rlstreams.workers.config.reward import RewardSection
from rlstreams.workers.rollout import verifier_child
from rlstreams.workers.rollout.environment import LostEpisodeError, Says
from rlstreams.workers.rollout.make_verifier import make_verifier
from rlstreams.workers.rollout.reward import RewardError
from rlstreams.workers.rollout.user_environment import UserEnvironment
from rlstreams.workers.rollout.verifier_child import Child, NoRoomError, started
from tests.processes.rollout.games import DEADLINE_S, World, begin, drive, turn
from tests.waiting import until

TOLD = r"grade\.py:grade has no process: in 2 tries, 0 s apart, none could be started: .*Too many"


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Those that are open stay so; there are no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(autouse=True)
def two_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_child, "NUM_TRIES", 2)
    monkeypatch.setattr(verifier_child, "PAUSE_S", 0.0)


def reward_section(folder: Path) -> RewardSection:
    file = folder / "grade.py"
    file.write_text(
        "import os\n\n"
        "def grade(prompt, completion, answer, metadata):\n"
        "    return 1.0 if completion else os._exit(3)\n"
    )
    return RewardSection(verifier=f"{file}:grade", processes=1, require_stop=False)


def test_a_verifier_without_a_process_is_an_error_in_words(tmp_path: Path) -> None:
    """At the start one that a supervisor tries again, later one of the sample; it recovers."""
    section = reward_section(tmp_path)
    with no_descriptors(), pytest.raises(DeadlineError, match=TOLD):
        make_verifier(section)
    with make_verifier(section) as one:
        with pytest.raises(RewardError, match="died with status 3"):
            one.judge("?", "", "", {}, "stop")
        with no_descriptors(), pytest.raises(RewardError, match=TOLD):
            one.judge("?", "a", "", {}, "stop")
        assert 1.0 == one.judge("?", "a", "", {}, "stop").reward


def test_an_environment_without_a_process_costs_no_attempt(world: World) -> None:
    """Its sample begins anew, as it has done nothing; at the start a supervisor tries again."""
    environment = world()
    with no_descriptors(), pytest.raises(DeadlineError, match="has no process: in 2 tries"):
        UserEnvironment(environment.code)

    async def scenario() -> None:
        environment._homes[0].child.end("is closed")
        with no_descriptors(), pytest.raises(LostEpisodeError, match=r"game\.py:Game has no proc"):
            await begin(environment).step(turn("a"))
        assert Says("no a") == await begin(environment).step(turn("a"))

    drive(scenario())


def test_room_that_comes_in_time_is_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment without file descriptors is waited out."""
    monkeypatch.setattr(verifier_child, "NUM_TRIES", 1 << 30)
    monkeypatch.setattr(verifier_child, "PAUSE_S", 0.001)

    async def scenario() -> None:
        environment = world()
        environment._homes[0].child.end("is closed")
        with no_descriptors():
            step = asyncio.create_task(begin(environment).step(turn("a")))
            await until(lambda: environment._starting is not None, "no process is started")
        assert Says("no a") == await asyncio.wait_for(step, DEADLINE_S)

    drive(scenario())


def test_a_start_without_a_thread_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended and reaped, and the error is the system's."""
    begun: list[Child] = []

    def start(thread: threading.Thread) -> None:
        begun.append(thread._target.__self__)  # type: ignore[attr-defined]
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(NoRoomError, match=f"Errno {errno.EAGAIN}.*can't start new thread"):
        started("{}", 1.0)
    assert [-9, -9] == [child._process.returncode for child in begun]


def test_who_is_closed_does_not_try_again() -> None:
    """A worker that ends waits for no room."""
    with no_descriptors(), pytest.raises(NoRoomError, match="in 1 tries"):
        started("{}", 1.0, is_wanted=lambda: False)
