"""The keeper of the embedded broker, with a small process in the broker's place."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.broker import BrokerState
from streams.errors import BrokerError
from workers.supervisor.broker import BrokerKeeper


class SmallBroker:
    """What the keeper uses of `EmbeddedBroker`."""

    folder = Path("broker")

    def __init__(self) -> None:
        self.num_starts = 0
        self.is_disk_full = False
        self.start()

    def start(self) -> BrokerState:
        self.num_starts += 1
        self.process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        return BrokerState(pid=self.process.pid, port=9, controller_port=8, cluster_id="c")

    def status(self) -> BrokerState | None:
        if self.process.poll() is not None:
            return None
        return BrokerState(pid=self.process.pid, port=9, controller_port=8, cluster_id="c")

    def log_tail(self) -> str:
        return "last words"

    def died_of_full_disk(self) -> bool:
        return self.is_disk_full

    def die(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def small() -> Iterator[SmallBroker]:
    small = SmallBroker()
    yield small
    small.die()


def test_a_dead_broker_is_started_again(small: SmallBroker) -> None:
    """And said; while it lives nothing happens."""
    said: list[str] = []
    keeper = BrokerKeeper(small, said.append, 0.0)  # type: ignore[arg-type]
    keeper.tick()
    assert (1, []) == (small.num_starts, said)
    small.die()
    keeper.tick()
    assert 2 == small.num_starts
    assert "127.0.0.1:9 as before" in said[0]


def test_a_broker_that_never_lives_is_given_up(small: SmallBroker) -> None:
    """Three quick deaths in a row, with its last words; a full disk at once."""
    keeper = BrokerKeeper(small, lambda _: None, 0.0)  # type: ignore[arg-type]
    for _ in range(2):
        small.die()
        keeper.tick()
    small.die()
    with pytest.raises(BrokerError, match=r"3 times in a row:\nlast words"):
        keeper.tick()
    small.is_disk_full = True
    with pytest.raises(BrokerError, match=r"disk under broker is full"):
        keeper.tick()


def test_our_own_kills_do_not_count(small: SmallBroker) -> None:
    """However often, and the time of detection is known."""
    keeper = BrokerKeeper(small, lambda _: None, 0.0)  # type: ignore[arg-type]
    for number in range(5):
        assert keeper.kill()
        small.process.wait()
        keeper.tick()
        assert 2 + number == small.num_starts
    assert keeper.last_death_seen_s > 0
    small.die()
    assert not keeper.signal(signal.SIGSTOP)
