"""Reading until something holds, with a deadline: what the contract tests share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rlstreams.streams.log.bus import Bus, GroupConsumer, Polled, Reader
from rlstreams.streams.log.record import Outgoing, Partition, RawRecord

T = TypeVar("T")
P0 = Partition("t", 0)
P1 = Partition("t", 1)
WAIT_S = 120.0


def record(value: bytes, *, key: bytes = b"k", topic: str = "t", partition: int = 0) -> Outgoing:
    return Outgoing(topic=topic, key=key, value=(value,), partition=partition)


def within(seconds: float, attempt: Callable[[], T | None], what: str) -> T:
    """The first answer of `attempt` that is not None."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (answer := attempt()) is not None:
            return answer
        time.sleep(0.002)
    raise AssertionError(f"not within {seconds} s: {what}")


def read(reader: Reader, count: int) -> list[RawRecord]:
    """Exactly `count` records."""
    records: list[RawRecord] = []
    deadline = time.monotonic() + WAIT_S
    while len(records) < count and time.monotonic() < deadline:
        records += reader.poll(count - len(records), 0.5)
    assert count == len(records)
    return records


def ends_at(bus: Bus, partition: Partition, offset: int) -> None:
    """The partition's last stable offset gets there: a transaction's markers follow its end."""
    within(
        WAIT_S,
        lambda: True if bus.ends(partition.topic)[partition] == offset else None,
        f"{partition} ends at {offset}",
    )


def values(records: Sequence[RawRecord]) -> list[bytes]:
    return [bytes(record.value) for record in records]


def joined(consumer: GroupConsumer, *, partitions: int, max_records: int = 0) -> list[Polled]:
    """Polls until the member has that many partitions."""
    owned: set[Partition] = set()
    polls: list[Polled] = []

    def attempt() -> list[Polled] | None:
        polls.append(consumer.poll(max_records, 0.2))
        owned.difference_update(polls[-1].revoked)
        owned.update(polls[-1].assigned)
        return polls if len(owned) == partitions else None

    return within(WAIT_S, attempt, f"a member has {partitions} partitions")


def shared_out(*members: GroupConsumer, each: int) -> dict[GroupConsumer, set[Partition]]:
    """Polls of all until each has that many partitions; which ones."""
    owned: dict[GroupConsumer, set[Partition]] = {member: set() for member in members}

    def is_shared() -> bool | None:
        for member, partitions in owned.items():
            polled = member.poll(0, 0.1)
            partitions.difference_update(polled.revoked)
            partitions.update(polled.assigned)
        return True if {each} == {len(p) for p in owned.values()} else None

    within(WAIT_S, is_shared, f"each of {len(members)} members has {each} partitions")
    return owned


def take(consumer: GroupConsumer, count: int) -> list[RawRecord]:
    records: list[RawRecord] = []
    deadline = time.monotonic() + WAIT_S
    while len(records) < count and time.monotonic() < deadline:
        records += consumer.poll(count - len(records), 0.5).records
    assert count == len(records)
    return records


def reaches(source: GroupConsumer | Reader, partition: Partition, offset: int) -> None:
    """Polls until the position is there, delivering nothing."""

    def attempt() -> bool | None:
        polled = source.poll(1, 0.1)
        assert not (polled.records if isinstance(polled, Polled) else polled)
        return True if source.positions()[partition] == offset else None

    within(WAIT_S, attempt, f"{partition} reaches {offset}, is at {source.positions()}")
