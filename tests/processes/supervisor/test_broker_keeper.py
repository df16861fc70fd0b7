"""The keeper of the embedded broker, with a small process in the broker's place."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlstreams.streams.broker import embedded
from rlstreams.streams.broker.embedded import BrokerState, EmbeddedBroker, _is_alive
from rlstreams.streams.log.errors import BrokerError, ConfigError
from rlstreams.streams.process.child import Orphaned
from rlstreams.up.supervisor import broker
from rlstreams.up.supervisor.broker import BrokerKeeper, outlasting
from tests.contract.polling import within

CHECK_S = 0.005
WAIT_S = 120.0


class SmallBroker:
    """What the keeper uses of `EmbeddedBroker`."""

    folder = Path("broker")

    def __init__(self) -> None:
        self.num_starts = 0
        self.ends_with: int | None = None  # instead of what really ended it
        self.start_fails = ""
        self.failures_left = -1  # -1: no end of them
        self.is_disk_full = self.is_out_of_sync = False
        self.may_start = threading.Event()
        self.may_start.set()
        self.start()

    def start(self) -> BrokerState:
        assert self.may_start.wait(WAIT_S)
        if self.start_fails and self.failures_left:
            self.num_starts += 1
            self.failures_left -= 1
            raise BrokerError(self.start_fails)
        self.process = subprocess.Popen(["sleep", "3600"])
        self.num_starts += 1
        return BrokerState(pid=self.process.pid, port=9, controller_port=8, cluster_id="c")

    def attach_or_start(self) -> BrokerState:
        return self.status() or self.start()

    @property
    def last_status(self) -> int | None:
        return self.process.poll() if self.ends_with is None else self.ends_with

    def status(self) -> BrokerState | None:
        if self.process.poll() is not None:
            return None
        return BrokerState(pid=self.process.pid, port=9, controller_port=8, cluster_id="c")

    def log_tail(self) -> str:
        return "last words"

    def died_of_full_disk(self) -> bool:
        return self.is_disk_full

    def lost_a_coordinator(self) -> bool:
        return self.is_out_of_sync

    def stop(self) -> bool:
        self.is_out_of_sync = False
        self.process.terminate()
        self.process.wait()
        return True

    def die(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(autouse=True)
def brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two attempts: a small broker is back at once."""
    for name in ("AGAIN_S", "FIRST_S"):
        monkeypatch.setattr(broker, name, CHECK_S)


@pytest.fixture
def small() -> Iterator[SmallBroker]:
    small = SmallBroker()
    yield small
    small.die()


def kept(
    small: SmallBroker, say: Callable[[str], None] = lambda _: None, room_s: float = 0.0
) -> BrokerKeeper:
    return BrokerKeeper(small, say, CHECK_S, room_s)  # type: ignore[arg-type]


def until(keeper: BrokerKeeper, reached: Callable[[], object]) -> None:
    """The loop of `up` goes round."""
    deadline_s = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline_s, "not reached in time"
        keeper.tick()
        time.sleep(CHECK_S)


def test_a_dead_broker_is_started_again(small: SmallBroker) -> None:
    said: list[str] = []
    with kept(small, said.append) as keeper:
        small.die()
        until(keeper, lambda: len(said) == 2)
    assert 2 == small.num_starts
    assert "the broker died; starting it again" == said[0]
    assert "127.0.0.1:9 as before" in said[1]


def test_the_loop_goes_on_while_the_broker_starts(small: SmallBroker) -> None:
    """A start takes seconds; a tick takes none, and nothing is sent to a broker that is not."""
    said: list[str] = []
    with kept(small, said.append) as keeper:
        small.may_start.clear()
        small.die()
        until(keeper, lambda: said)
        assert (1, False, False) == (small.num_starts, keeper.kill(), keeper.signal(signal.SIGCONT))
        small.may_start.set()
        until(keeper, lambda: len(said) == 2)
        assert keeper.signal(signal.SIGCONT)


def test_a_broker_that_never_lives_is_given_up(small: SmallBroker) -> None:
    """Ends by itself and starts that fail count alike; each is named, with its last words."""
    said: list[str] = []
    with kept(small, said.append) as keeper:
        small.ends_with = 3
        small.die()
        until(keeper, lambda: small.num_starts == 2)
        small.start_fails = "broker ended while starting (exit -9)\nlast words"
        small.die()
        with pytest.raises(
            BrokerError, match=r"failed 5 times in a row within \d+ s; .*-9\)\nlast"
        ):
            until(keeper, lambda: False)
    assert any("failed (3 of 5), its start failed: broker ended" in line for line in said)


def test_a_successor_that_is_killed_too_is_followed_by_another(small: SmallBroker) -> None:
    """A start that fails is a failure, not the end."""
    said: list[str] = []
    with kept(small, said.append) as keeper:
        small.start_fails, small.failures_left = "broker ended while starting (exit -9)", 2
        small.die()
        until(keeper, lambda: small.num_starts == 4 and not keeper.is_away)
        keeper.tick()
    assert any("failed (2 of 5), its start failed: broker ended" in line for line in said)
    assert small.status() is not None


def test_failures_with_headway_between_them_are_not_in_a_row(small: SmallBroker) -> None:
    """The broker and its successor are killed again and again, and the run goes on in between."""
    with kept(small) as keeper:
        for number in range(broker.QUICK_LIMIT + 2):
            small.start_fails, small.failures_left = "broker ended while starting (exit -9)", 1
            small.die()
            until(keeper, lambda number=number: small.num_starts == 3 + 2 * number)
            until(keeper, lambda: not keeper.is_away)
            keeper.made_headway()


def test_a_broker_that_is_killed_while_it_serves_did_not_fail(small: SmallBroker) -> None:
    """However often, and whoever did it."""
    with kept(small) as keeper:
        for number in range(broker.QUICK_LIMIT + 2):
            small.die()
            until(keeper, lambda number=number: small.num_starts == 2 + number)
            until(keeper, lambda: not keeper.is_away)


def test_room_on_a_full_disk_is_waited_for_with_a_deadline(small: SmallBroker) -> None:
    """More often than a failure would be borne; with room it serves again."""
    said: list[str] = []
    full = "broker: cannot format: No space left on device"
    with kept(small, said.append, room_s=WAIT_S) as keeper:
        small.start_fails = full
        small.die()
        until(keeper, lambda: small.num_starts > broker.QUICK_LIMIT + 2)
        small.start_fails = ""
        until(keeper, lambda: not keeper.is_away)
    assert "is full: the broker waits for room, at most 120 s" in " ".join(said)
    small.start_fails = full
    with kept(small, room_s=0.05) as keeper:
        small.die()
        with pytest.raises(BrokerError, match=r"disk under broker is full, and there was no room"):
            until(keeper, lambda: False)


def test_a_disk_that_is_full_again_and_again_is_no_failure_of_the_broker(
    small: SmallBroker,
) -> None:
    """It dies with a long trace, soon after each start, as often as it likes."""
    small.ends_with, small.is_disk_full = 1, True
    with kept(small, room_s=WAIT_S) as keeper:
        for number in range(broker.QUICK_LIMIT + 2):
            small.die()
            until(keeper, lambda number=number: small.num_starts == 2 + number)
            until(keeper, lambda: not keeper.is_away)


@pytest.mark.parametrize("is_asked", [False, True])
def test_what_a_clean_restart_cures(small: SmallBroker, *, is_asked: bool) -> None:
    """A coordinator that gave itself up, or a stage that is not fed; said, and no failure."""
    said: list[str] = []
    with kept(small, said.append) as keeper:
        if is_asked:
            keeper.restart("rollout gets nothing")
        else:
            small.is_out_of_sync = True
        until(keeper, lambda: small.num_starts == 2 and not keeper.is_away)
        keeper.tick()
    why = "rollout gets nothing" if is_asked else "it lost the coordinator of a group"
    assert f"restarting the broker once: {why}" == said[0]
    assert "started again" in said[-1]


def test_a_start_that_is_under_way_is_ended_with_the_run(small: SmallBroker) -> None:
    """Nobody else would stop that broker: no `up` leaves one behind."""

    class Slow(SmallBroker):
        def attach_or_start(self) -> BrokerState:
            state = self.start()
            if self.process.wait(WAIT_S):  # until somebody kills it
                raise BrokerError("broker ended while starting")
            return state

    slow = Slow()
    with kept(slow) as keeper:
        slow.die()
        until(keeper, lambda: slow.num_starts == 2)
    assert slow.status() is None


def test_our_own_kills_do_not_count(small: SmallBroker) -> None:
    """However often."""
    with kept(small) as keeper:
        for number in range(5):
            until(keeper, keeper.kill)  # the keeper is told of a start a moment after it was made
            until(keeper, lambda number=number: small.num_starts == 2 + number)
    small.die()
    assert not keeper.signal(signal.SIGSTOP)


def test_what_a_dying_broker_interrupts_is_made_again(small: SmallBroker) -> None:
    """Until the broker is back; whose broker is not ours is told at once."""

    def attempt() -> None:
        if small.num_starts < 2:
            raise BrokerError("unreachable")

    with pytest.raises(BrokerError, match="unreachable"):
        outlasting(attempt, None)
    with kept(small) as keeper:
        small.die()
        outlasting(attempt, keeper)
    assert 2 == small.num_starts


def test_what_no_broker_can_cure_is_not_tried_again(small: SmallBroker) -> None:
    """Neither an error of another kind, nor anything once the keeper has given up."""

    def refused() -> None:
        raise ConfigError("wrong")

    def unreachable() -> None:
        raise BrokerError("unreachable")

    with kept(small) as keeper:
        with pytest.raises(ConfigError):
            outlasting(refused, keeper)
        small.start_fails = "wrong"
        small.die()
        with pytest.raises(BrokerError, match="5 times in a row"):
            outlasting(unreachable, keeper)


def test_an_error_on_a_full_disk_is_told_as_such(
    small: SmallBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker whose log has failed answers with an error of its own, a moment before it ends."""

    def failed() -> None:
        raise BrokerError("KAFKA_STORAGE_ERROR")

    with kept(small) as keeper:
        monkeypatch.setattr(broker, "is_full", lambda _: True)
        with pytest.raises(BrokerError, match="the broker's disk is full"):
            outlasting(failed, keeper)


@pytest.mark.parametrize(
    ("step", "is_minded"), [("format", False), ("fence", False), ("format", True)]
)
def test_a_start_whose_starter_was_killed_holds_no_lock(
    tmp_path: Path, step: str, *, is_minded: bool
) -> None:
    """`up` was killed while it prepared its broker: the next one goes on, and nothing is left."""
    starter = subprocess.Popen(
        [sys.executable, "-c", PREPARES, str(tmp_path), step], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    with starter.stdout:
        helper = int(starter.stdout.readline())
    one = EmbeddedBroker(tmp_path)
    try:
        if is_minded:
            with pytest.raises(ConfigError, match="in use by a starting broker"), one._locked():
                pass
        else:
            starter.kill()
            with one._locked():
                within(WAIT_S, lambda: not _is_alive(helper) or None, "the helper's end")
    finally:
        starter.kill()
        starter.wait()


# A step of a start that takes for ever, with a program in the place of Java.
PREPARES = """
import sys, threading, time
from pathlib import Path
from rlstreams.streams.broker import embedded
def say():
    while not embedded._CHILDREN:
        time.sleep(0.01)
    print(embedded._CHILDREN[-1].pid, flush=True)
threading.Thread(target=say, daemon=True).start()
embedded.FENCE_S = embedded.START_S
one, java = embedded.EmbeddedBroker(Path(sys.argv[1])), ("sh", "-c", "exec sleep 3600")
state = embedded.BrokerState(pid=0, port=9, controller_port=8, cluster_id="c")
with one._locked() as lock_fd:
    if sys.argv[2] == "format":
        one._format(java, "c", lock_fd)
    else:
        one._fence_dead(java, state, lock_fd)
"""


def test_a_broker_that_takes_no_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After its time, and `stop` says so; the folder is free behind it."""
    monkeypatch.setattr(embedded, "STOP_S", 0.3)
    one = EmbeddedBroker(tmp_path)
    with one._locked() as lock_fd:
        deaf = ("sh", "-c", "trap '' TERM; exec sleep 3600")
        child = one._spawn(deaf, lock_fd, Orphaned.LIVES)
        one._write_state(BrokerState(pid=child.pid, port=9, controller_port=8, cluster_id="c"))
    try:
        comm = Path(f"/proc/{child.pid}/comm")
        within(WAIT_S, lambda: comm.read_text() == "sleep\n" or None, "it is deaf")
        assert one.stop() is True
    finally:
        child.kill()
    assert f"broker {child.pid} ignored SIGTERM" in capsys.readouterr().err
    assert -signal.SIGKILL == child.poll()
    with one._locked():
        assert one.status() is None


def test_the_state_of_a_broker_of_another_release_is_read(tmp_path: Path) -> None:
    """Its port and its cluster's id are those of the data."""
    state = {"pid": 7, "port": 9, "controller_port": 8, "cluster_id": "c", "helper": 5, "new": 1}
    (tmp_path / "broker.json").write_text(json.dumps(state))
    found = EmbeddedBroker(tmp_path)._read_state()
    assert BrokerState(pid=7, port=9, controller_port=8, cluster_id="c") == found
