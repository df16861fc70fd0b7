"""Who stops a broker that several look at."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest

from rlstreams.streams.broker import visits
from rlstreams.streams.broker.embedded import BrokerState, EmbeddedBroker
from rlstreams.streams.broker.visits import owned, visited
from rlstreams.streams.log.errors import BrokerError


class FakeBroker(EmbeddedBroker):
    """Runs, or does not; there is no process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_starts = 0
        self._state: BrokerState | None = None

    def status(self) -> BrokerState | None:
        return self._state

    def attach_or_start(self) -> BrokerState:
        if self._state is None:
            self.num_starts += 1
            pid = 100 + self.num_starts
            self._state = BrokerState(pid=pid, port=pid, controller_port=0, cluster_id="")
        return self._state

    def stop(self) -> bool:
        was, self._state = self._state, None
        return was is not None


@pytest.fixture
def broker(tmp_path: Path) -> FakeBroker:
    return FakeBroker(tmp_path / "broker")


def test_the_last_visitor_stops_what_was_started_for_a_look(broker: FakeBroker) -> None:
    """The first one may leave before: the second goes on reading."""
    with ExitStack() as first, ExitStack() as second:
        assert "127.0.0.1:101" == first.enter_context(visited(broker))
        assert "127.0.0.1:101" == second.enter_context(visited(broker))
        first.close()
        assert broker.status() is not None
    assert (None, 1) == (broker.status(), broker.num_starts)


def test_a_broker_that_runs_is_left_running(broker: FakeBroker) -> None:
    broker.folder.mkdir()
    broker.attach_or_start()
    with visited(broker):
        pass
    assert broker.status() is not None


def test_a_visit_that_fails_stops_what_it_started(broker: FakeBroker) -> None:
    with pytest.raises(ZeroDivisionError), visited(broker):
        raise ZeroDivisionError
    assert broker.status() is None


def test_an_owner_stops_it_but_not_under_a_visitor(broker: FakeBroker) -> None:
    """`up` that ends leaves it to whoever reads, and that one stops it."""
    with owned(broker):
        pass
    assert broker.status() is None
    with ExitStack() as reader:
        with owned(broker):
            reader.enter_context(visited(broker))
        assert broker.status() is not None
    assert broker.status() is None


def test_an_owner_takes_over_what_was_started_for_a_look(broker: FakeBroker) -> None:
    """A visitor who leaves does not stop the broker of a run that began meanwhile."""
    with ExitStack() as reader:
        reader.enter_context(visited(broker))
        with owned(broker):
            reader.close()
            assert broker.status() is not None
    assert (None, 1) == (broker.status(), broker.num_starts)


def test_a_mark_is_about_one_process(broker: FakeBroker) -> None:
    """That of a broker that was killed says nothing of the one that somebody started after it."""
    visit = visited(broker)
    visit.__enter__()
    broker.stop()  # killed, and with it the visitor
    broker.attach_or_start()
    visit.__exit__(None, None, None)
    with visited(broker):
        pass
    assert broker.status() is not None


def test_a_folder_that_cannot_be_written_says_what_to_do(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run on a disk that is mounted read-only nothing could be said but the lock's name."""

    def refuse(path: Path, wait_s: float = 0.0) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(visits, "held", refuse)
    with pytest.raises(BrokerError, match=r"copy the run's folder .* recording"), visited(broker):
        pass
