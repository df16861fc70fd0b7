"""Which transactions a worker settles for its peers, and that others may be quicker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlstreams.streams.log.bus import Producer
from rlstreams.streams.log.errors import FencedError
from rlstreams.workers.bootstrap.peers import abandoned, settle
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog


def test_only_of_its_role_and_only_who_joined_by_itself() -> None:
    standing = (
        "run.rollout.1000",
        "run.rollout.1001",
        "run.rollout.7",  # `up` or a unit starts it again
        "run.rollout.1002.lease",
        "run.rollout.x",
        "run2.rollout.1000",
        "run.logprob.1000",
        "rollout.1000",
    )
    assert ["rollout.1000"] == abandoned(standing, "run", "rollout", "rollout.1001")


class Watched(MemoryBus):
    """Notes whose producers were started; some are taken."""

    def __init__(self, taken: Sequence[str] = ()) -> None:
        super().__init__(MemoryLog(), "run")
        self.started: list[str] = []
        self._taken = taken

    def producer(self, transactional_id: str) -> Producer:
        self.started.append(transactional_id)
        if transactional_id in self._taken:
            raise FencedError("another started")
        return super().producer(transactional_id)


def settled(bus: Watched, *looks: Sequence[str], ends: bool = False) -> list[str]:
    answers: Iterator[Sequence[str]] = iter(looks)
    noted: list[str] = []
    settle(bus, lambda: next(answers), noted.append, lambda _: ends)
    return noted


def test_what_stands_in_two_looks_is_settled_once() -> None:
    bus = Watched()
    assert ["rollout.1000"] == settled(bus, ["rollout.1000", "rollout.1001"], ["rollout.1000"])
    assert ["rollout.1000"] == bus.started


def test_who_was_quicker_is_left_alone() -> None:
    """A peer, or its successor: between the looks, or at the same moment."""
    bus = Watched(taken=["rollout.1000"])
    assert not settled(bus, ["rollout.1001"], [])
    assert not settled(bus, [])
    assert not settled(bus, ["rollout.1001"], ends=True)
    assert not bus.started
    assert ["rollout.1001"] == settled(bus, *[["rollout.1000", "rollout.1001"]] * 2)
