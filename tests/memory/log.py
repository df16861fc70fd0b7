"""A log in one process that behaves as Kafka's does: the state that `MemoryBus` handles share.

Transactions are open, then committed or aborted; their markers take offsets; nothing is read past
the last stable offset, the first offset of an open transaction. Names carry the run's prefix.
All methods are safe to call from several threads.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from rlstreams.streams.log.errors import (
    AbortedError,
    FencedError,
    OffsetGoneError,
    OutcomeUnknownError,
    RefusedError,
    TopicMismatchError,
)
from rlstreams.streams.log.parts import Message
from rlstreams.streams.log.record import Committed, Partition


def named(run: str, partition: Partition) -> Partition:
    """A run's partition as the log names it."""
    return Partition(f"{run}.{partition.topic}", partition.number)


class State(Enum):
    """Where a transaction is."""

    OPEN = auto()
    COMMITTED = auto()
    ABORTED = auto()


class Fault(Enum):
    """What goes wrong with the next commit of a transactional id."""

    BEFORE = auto()  # aborted: nothing happened
    AFTER = auto()  # committed, but the answer is lost


@dataclass(slots=True, eq=False)
class Transaction:
    """All or nothing; made by `MemoryLog.begin`."""

    transactional_id: str
    epoch: int
    state: State = State.OPEN
    touched: set[Partition] = field(default_factory=set)
    offsets: list[tuple[str, Mapping[Partition, Committed]]] = field(default_factory=list)


@dataclass(slots=True)
class _Log:
    begin: int = 0
    entries: list[tuple[Message | None, Transaction]] = field(default_factory=list)  # None: marker
    opened: dict[Transaction, int] = field(default_factory=dict)  # at which offset

    @property
    def end(self) -> int:
        return self.begin + len(self.entries)

    @property
    def stable(self) -> int:
        return min(self.opened.values(), default=self.end)

    def append(self, message: Message | None, transaction: Transaction) -> int:
        offset = self.end
        if message is None:
            self.opened.pop(transaction, None)
        else:
            self.opened.setdefault(transaction, offset)
            message = message._replace(offset=offset)
        self.entries.append((message, transaction))
        return offset

    def write(self, message: Message, alone: Transaction) -> int:
        offset = self.end
        self.entries.append((message._replace(offset=offset), alone))
        return offset

    def next_committed(self, offset: int) -> Message | None:
        for index in range(offset - self.begin, self.stable - self.begin):
            message, transaction = self.entries[index]
            if message is not None and transaction.state is State.COMMITTED:
                return message
        return None


@dataclass(slots=True)
class _Topic:
    logs: list[_Log]
    topic_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Member:
    """One consumer. `owned` is what it was told at its last poll."""

    partitions: Sequence[Partition]  # of all topics that it subscribed to
    owned: set[Partition] = field(default_factory=set)


@dataclass(slots=True)
class Group:
    """A partition has one owner at a time: it is given on only after its owner let it go."""

    committed: dict[Partition, Committed] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)  # by order of joining
    num_joined: int = 0

    def join(self, partitions: Sequence[Partition]) -> int:
        """Add a member: its id."""
        self.num_joined += 1
        self.members[self.num_joined] = Member(partitions)
        return self.num_joined

    def targets(self) -> Mapping[Partition, int]:
        """The member that each partition should go to: in turn, over the sorted partitions."""
        wanted = sorted({p for member in self.members.values() for p in member.partitions})
        targets: dict[Partition, int] = {}
        for turn, partition in enumerate(wanted):
            ids = [i for i, m in self.members.items() if partition in m.partitions]
            targets[partition] = ids[turn % len(ids)]
        return targets

    def revocations(self, member_id: int) -> frozenset[Partition]:
        """What the member must let go."""
        targets = self.targets()
        owned = self.members[member_id].owned
        return frozenset(p for p in owned if targets.get(p) != member_id)

    def grants(self, member_id: int) -> Sequence[Partition]:
        """What the member may take now: its target, as far as no other member has it."""
        taken = {p for member in self.members.values() for p in member.owned}
        return [p for p, owner in self.targets().items() if owner == member_id and p not in taken]


class MemoryLog:
    """Topics, transactions and groups of one cluster."""

    def __init__(self) -> None:
        self.cluster_id = str(uuid.uuid4())
        self.changed = threading.Condition()
        self._topics: dict[str, _Topic] = {}
        self._epochs: dict[str, int] = {}
        self._open: dict[str, Transaction] = {}
        self._faults: dict[str, Fault] = {}
        self._append_fault: Fault | None = None
        self._groups: dict[str, Group] = {}

    def create(self, topic: str, partitions: int) -> None:
        """Make `topic`, empty; one of that name is replaced and gets another id."""
        with self.changed:
            self._topics[topic] = _Topic([_Log() for _ in range(partitions)])
            self.changed.notify_all()

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """Note topic settings. Only `max.message.bytes` is acted on; `trim` does what time does."""
        self.topic(topic).settings |= settings

    def trim(self, partition: Partition, begin: int) -> None:
        """Remove what lies below `begin`, as retention does."""
        with self.changed:
            log = self._log(partition)
            log.entries, log.begin = log.entries[begin - log.begin :], begin
            self.changed.notify_all()

    def topic(self, name: str) -> _Topic:
        """Raises TopicMismatchError: there is none of that name."""
        with self.changed:
            if name not in self._topics:
                raise TopicMismatchError(f"topic {name} does not exist in this memory log")
            return self._topics[name]

    def range(self, partition: Partition) -> tuple[int, int]:
        """First offset, last stable offset."""
        with self.changed:
            log = self._log(partition)
            return log.begin, log.stable

    def written_since(self, partition: Partition, at_ms: int) -> tuple[int, int]:
        """First offset of a message of that time or later, and the end, transactions or not."""
        with self.changed:
            log = self._log(partition)
            young = (
                offset
                for offset, (message, _) in enumerate(log.entries, log.begin)
                if message is not None and message.timestamp_ms >= at_ms
            )
            return next(young, log.end), log.end

    def read(self, partition: Partition, offset: int) -> tuple[Message | None, int]:
        """The next committed message from `offset` on, and the offset after it.

        Without one: None, and the last stable offset. Raises OffsetGoneError: outside the log.
        """
        with self.changed:
            log = self._log(partition)
            if not log.begin <= offset <= log.end:
                raise OffsetGoneError(
                    f"{partition}: offset {offset} was asked for, "
                    f"the topic has {log.begin} to {log.stable}"
                )
            message = log.next_committed(offset)
            return message, max(offset, log.stable) if message is None else message.offset + 1

    def _log(self, partition: Partition) -> _Log:
        return self.topic(partition.topic).logs[partition.number]

    def initialise(self, transactional_id: str) -> int:
        """A new producer's epoch. Its predecessor is fenced and its transaction aborted."""
        with self.changed:
            if transactional_id in self._open:
                self._end(self._open[transactional_id], State.ABORTED)
            self._epochs[transactional_id] = self._epochs.get(transactional_id, -1) + 1
            return self._epochs[transactional_id]

    def begin(self, transactional_id: str, epoch: int) -> Transaction:
        """An open transaction. Raises FencedError: a newer producer has the id."""
        with self.changed:
            self._check(transactional_id, epoch)
            self._open[transactional_id] = Transaction(transactional_id, epoch)
            return self._open[transactional_id]

    def append(self, transaction: Transaction, message: Message) -> int:
        """Write; the offset it got. Readers see it once the transaction is committed."""
        with self.changed:
            self._check(transaction.transactional_id, transaction.epoch)
            limit = self.topic(message.partition.topic).settings.get("max.message.bytes")
            if limit is not None and len(message.value) > int(limit):
                raise RefusedError(f"{len(message.value)} bytes, max.message.bytes is {limit}")
            transaction.touched.add(message.partition)
            return self._log(message.partition).append(message, transaction)

    def write(self, message: Message) -> int:
        """Write outside of any transaction; the offset it got. Raises what was injected."""
        with self.changed:
            limit = self.topic(message.partition.topic).settings.get("max.message.bytes")
            if limit is not None and len(message.value) > int(limit):
                raise RefusedError(f"{len(message.value)} bytes, max.message.bytes is {limit}")
            fault, self._append_fault = self._append_fault, None
            if fault is Fault.BEFORE:
                raise OutcomeUnknownError("a record was not acknowledged (injected)")
            alone = Transaction("", 0, State.COMMITTED)
            offset = self._log(message.partition).write(message, alone)
            self.changed.notify_all()
        if fault is Fault.AFTER:
            raise OutcomeUnknownError("a record's acknowledgement is lost (injected)")
        return offset

    def fail_next_append(self, fault: Fault) -> None:
        """Let the next record that is written outside of transactions go wrong."""
        self._append_fault = fault

    def add_offsets(
        self, transaction: Transaction, group: str, offsets: Mapping[Partition, Committed]
    ) -> None:
        """Positions to commit with it; pending until it ends."""
        with self.changed:
            self._check(transaction.transactional_id, transaction.epoch)
            transaction.offsets.append((group, dict(offsets)))

    def end(self, transaction: Transaction, state: State) -> None:
        """Commit or abort. Raises as `begin`, and what an injected fault raises."""
        with self.changed:
            name = transaction.transactional_id
            self._check(name, transaction.epoch)
            fault = self._faults.pop(name, None) if state is State.COMMITTED else None
            self._end(transaction, State.ABORTED if fault is Fault.BEFORE else state)
            if fault is Fault.BEFORE:
                raise AbortedError(f"transactional id {name}: aborted (injected)")
            if fault is Fault.AFTER:
                raise OutcomeUnknownError(f"transactional id {name}: answer lost (injected)")

    def fail_next_commit(self, transactional_id: str, fault: Fault) -> None:
        """Let the next commit of this id go wrong."""
        self._faults[transactional_id] = fault

    def _check(self, transactional_id: str, epoch: int) -> None:
        newest = self._epochs.get(transactional_id)
        if epoch != newest:
            raise FencedError(
                f"transactional id {transactional_id} is fenced: our epoch is {epoch}, "
                f"the newest {newest}"
            )

    def _end(self, transaction: Transaction, state: State) -> None:
        transaction.state = state
        del self._open[transaction.transactional_id]
        for partition in sorted(transaction.touched):
            self._log(partition).append(None, transaction)
        if state is State.COMMITTED:
            for group, offsets in transaction.offsets:
                self.group(group).committed |= offsets
        self.changed.notify_all()

    def group(self, name: str) -> Group:
        """The group of that name. Hold `changed` while using it."""
        return self._groups.setdefault(name, Group())

    def is_stable(self, group: str, partition: Partition) -> bool:
        """Whether no open transaction carries a position of this partition."""
        with self.changed:
            pending = (found for open_ in self._open.values() for found in open_.offsets)
            return not any(name == group and partition in offsets for name, offsets in pending)

    def wait_until(self, predicate: Callable[[], bool], deadline: float) -> bool:
        """Wait for a change that makes `predicate` true, until `deadline` (monotonic)."""
        with self.changed:
            return self.changed.wait_for(predicate, max(0.0, deadline - time.monotonic()))
