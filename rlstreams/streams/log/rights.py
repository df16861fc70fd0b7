"""A role's own view of the log, which refuses topics that the table of topics does not give it.

The table (`topics.py`) names the writers and readers of each topic. Roles work through `OfRole`, so
a role that begins to use another topic fails in its first test until the table lists it, and a
broker with the ACLs of `acls` enforces the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rlstreams.schemas import SchemaTexts
from rlstreams.streams.log.bus import (
    Appender,
    Bus,
    Closing,
    Commit,
    GroupConsumer,
    Producer,
    Reader,
)
from rlstreams.streams.log.record import Committed, Outgoing, Partition, Position, RawRecord
from rlstreams.streams.log.roles import ROLES
from rlstreams.streams.log.topics import TOPICS

READERS = "readers"  # the group that readers name
OPERATOR, UP = "operator", "up"
PRINCIPALS = (*ROLES, OPERATOR, UP)  # that a broker with an authorizer tells apart
_OF_OPERATORS = ("operator", "control")  # their transactional ids
_WRITES = {role: {t.name for t in TOPICS if role in t.written_by} for role in ROLES}
_READS = {role: {t.name for t in TOPICS if {role, "any"} & set(t.read_by)} for role in ROLES}


class NoRightError(Exception):
    """A role uses a topic that the table does not give it: a mistake of ours."""


def _check(role: str, rights: Mapping[str, set[str]], topics: Iterable[str], does: str) -> None:
    for topic in topics:
        if topic not in rights[role]:
            raise NoRightError(
                f"role {role} {does} {topic}: `streams/log/topics.py` says it does not"
            )


class OfRole(Closing):
    """The port `Bus` for one role; checks rights, and passes calls on to another bus."""

    def __init__(self, bus: Bus, role: str) -> None:
        """
        Args:
            role: one of `ROLES`.
        """
        self._bus = bus
        self._role = role

    def producer(self, transactional_id: str) -> Producer:
        """See `Bus`."""
        return _Producer(self._bus.producer(transactional_id), self._role)

    def appender(self) -> Appender:
        """See `Bus`."""
        return _Appender(self._bus.appender(), self._role)

    def consumer(self, group: str, topics: Sequence[str]) -> GroupConsumer:
        """See `Bus`."""
        _check(self._role, _READS, topics, "reads")
        return self._bus.consumer(group, topics)

    def reader(self, offsets: Mapping[Partition, int] | None = None) -> Reader:
        """See `Bus`."""
        _check(self._role, _READS, {p.topic for p in offsets or ()}, "reads")
        return _Reader(self._bus.reader(offsets), self._role)

    def partitions(self, topic: str) -> int:
        """See `Bus`."""
        return self._bus.partitions(topic)

    def topic_ids(self, topics: Sequence[str]) -> Mapping[str, str]:
        """See `Bus`."""
        return self._bus.topic_ids(topics)

    def settings(self, topic: str) -> Mapping[str, str]:
        """See `Bus`."""
        return self._bus.settings(topic)

    def cluster_id(self) -> str:
        """See `Bus`."""
        return self._bus.cluster_id()

    def schemas(self) -> SchemaTexts:
        """See `Bus`."""
        return self._bus.schemas()

    def beginnings(self, topic: str) -> Mapping[Partition, int]:
        """See `Bus`."""
        return self._bus.beginnings(topic)

    def ends(self, topic: str) -> Mapping[Partition, int]:
        """See `Bus`."""
        return self._bus.ends(topic)

    def written_since(self, partition: Partition, at_ms: int) -> tuple[int, int]:
        """See `Bus`."""
        return self._bus.written_since(partition, at_ms)

    def committed(self, group: str, topic: str) -> Mapping[Partition, Committed]:
        """See `Bus`."""
        return self._bus.committed(group, topic)

    def close(self) -> None:
        """Close the bus."""
        self._bus.close()


class _Producer(Closing):
    def __init__(self, producer: Producer, role: str) -> None:
        self._producer = producer
        self._role = role

    def commit(
        self,
        records: Sequence[Outgoing],
        consumed: Mapping[Partition, Committed] | None = None,
        consumer: GroupConsumer | None = None,
    ) -> Sequence[Position]:
        """See `Producer`."""
        _check(self._role, _WRITES, {record.topic for record in records}, "writes")
        return self._producer.commit(records, consumed, consumer)

    def start(
        self,
        records: Sequence[Outgoing],
        consumed: Mapping[Partition, Committed] | None = None,
        consumer: GroupConsumer | None = None,
    ) -> Commit:
        """See `Producer`."""
        _check(self._role, _WRITES, {record.topic for record in records}, "writes")
        return self._producer.start(records, consumed, consumer)

    def close(self) -> None:
        """See `Producer`."""
        self._producer.close()


class _Appender(Closing):
    def __init__(self, appender: Appender, role: str) -> None:
        self._appender = appender
        self._role = role

    def append(self, record: Outgoing) -> Future[Position]:
        """See `Appender`."""
        _check(self._role, _WRITES, (record.topic,), "writes")
        return self._appender.append(record)

    def close(self) -> None:
        """See `Appender`."""
        self._appender.close()


class _Reader(Closing):
    def __init__(self, reader: Reader, role: str) -> None:
        self._reader = reader
        self._role = role

    def poll(self, max_records: int, timeout_s: float) -> Sequence[RawRecord]:
        """See `Reader`."""
        return self._reader.poll(max_records, timeout_s)

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """See `Reader`."""
        _check(self._role, _READS, {partition.topic for partition in offsets}, "reads")
        self._reader.seek(offsets)

    def positions(self) -> Mapping[Partition, int]:
        """See `Reader`."""
        return self._reader.positions()

    def close(self) -> None:
        """See `Reader`."""
        self._reader.close()


@dataclass(frozen=True, slots=True)
class Acl:
    """Operations on one resource that a broker with an authorizer must allow a role."""

    resource: str  # "topic", "group", "transactional-id", as kafka-acls.sh names its option
    name: str
    is_prefix: bool  # of names
    operations: tuple[str, ...]

    def arguments(self) -> str:
        """Return arguments of `kafka-acls.sh --add`, without a principal."""
        pattern = " --resource-pattern-type prefixed" if self.is_prefix else ""
        operations = " ".join(f"--operation {name}" for name in self.operations)
        return f"{operations} --{self.resource} {self.name}{pattern}"


def acls(run: str, principal: str) -> Iterator[Acl]:
    """Yield the least rights of one of `PRINCIPALS`: with these and no others it does its work.

    An operator reads all topics and writes what commands write. `up` makes topics and has one login
    for all roles that it starts: everything that is this run's.
    """
    if principal == UP:
        for resource in ("topic", "group", "transactional-id"):
            yield Acl(resource, f"{run}.", is_prefix=True, operations=("All",))
        return
    for topic in TOPICS:
        may = [
            name
            for name, is_given in (
                ("Read", principal == OPERATOR or topic.name in _READS[principal]),
                ("Write", principal in topic.written_by),
            )
            if is_given
        ]
        operations = (*may, "Describe", "DescribeConfigs")  # a claim names topics and settings
        yield Acl("topic", f"{run}.{topic.name}", is_prefix=False, operations=operations)
    if principal == OPERATOR:  # positions of all groups, and who has a transaction open
        yield Acl("group", f"{run}.", is_prefix=True, operations=("Describe",))
        yield Acl("transactional-id", f"{run}.", is_prefix=True, operations=("Describe",))
        for name in _OF_OPERATORS:
            yield Acl("transactional-id", f"{run}.{name}", is_prefix=False, operations=("Write",))
        return
    yield Acl("group", f"{run}.{principal}", is_prefix=False, operations=("Read", "Describe"))
    # Readers join no group, but the client asks for the coordinator of their group's name.
    yield Acl("group", f"{run}.{READERS}", is_prefix=False, operations=("Describe",))
    yield Acl(
        "transactional-id", f"{run}.{principal}.", is_prefix=True, operations=("Write", "Describe")
    )
