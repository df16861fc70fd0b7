"""Which open transactions nobody ends: clocks of hosts differ, so one look is not enough."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka import TopicPartition

from rlstreams.streams.kafka.open_transactions import open_in

P = TopicPartition("run.steps", 0)


@dataclass(frozen=True)
class Producer:
    """As kafka-python describes one."""

    producer_id: int
    behind_s: float = 0.0  # its clock, at its last write
    current_transaction_start_offset: int = 5
    producer_epoch: int = 0
    last_timestamp: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "last_timestamp", round((time.time() - self.behind_s) * 1000))


@dataclass
class Partition:
    active_producers: Sequence[Producer]


class Admin:
    """Answers with these in turn."""

    def __init__(self, *looks: Sequence[Producer]) -> None:
        self.looks = list(looks)

    def describe_producers(self, partitions: list[TopicPartition]) -> dict[TopicPartition, Any]:
        assert [P] == partitions
        return {P: Partition(self.looks.pop(0))}

    def list_transactions(self) -> Any:
        return {}


def found(admin: Any, older_than_s: float | None = 35.0) -> list[int]:
    return [one.producer_id for one in open_in(admin, [P], older_than_s=older_than_s, watch_s=0)]


def test_commits_of_a_host_whose_clock_is_behind_do_not_hang() -> None:
    """One ended meanwhile, one began another, one was added to; the fourth is as it was."""
    ended, stuck = Producer(1, 60.0), Producer(4, 60.0)
    before = [ended, Producer(2, 60.0), Producer(3, 60.0), stuck]
    after = [
        Producer(1, 60.0, current_transaction_start_offset=-1),
        Producer(2, 60.0, current_transaction_start_offset=9),
        Producer(3, 59.0),
        stuck,
    ]
    assert [4] == found(Admin(before, after))


def test_where_none_seems_old_there_is_one_look() -> None:
    """An audit of a healthy run does not wait; without an age all are looked at twice."""
    young = Producer(1)
    assert [] == found(Admin([young]))
    assert [1] == found(Admin([young], [young]), older_than_s=None)
