"""Both kinds of cluster behind one face: what a contract test needs beside the ports."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)

from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.kafka.consumer import KafkaGroupConsumer
from rlstreams.streams.log.bus import Bus, GroupConsumer
from rlstreams.streams.log.parts import Message
from rlstreams.streams.log.record import Committed, Partition
from tests.memory.bus import MemoryBus
from tests.memory.consumer import MemoryGroupConsumer
from tests.memory.log import MemoryLog, State, Transaction

DEADLINE_S = 60.0
_EXPELLED_AFTER_S = 1.5


class RawTransaction(Protocol):
    """A transaction driven step by step, without our producer."""

    def send(
        self, topic: str, partition: int, key: bytes, value: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Write one message."""

    def add_offsets(
        self, group: str, consumer: GroupConsumer, offsets: Mapping[Partition, Committed]
    ) -> None:
        """Add positions."""

    def commit(self) -> None:
        """End it."""

    def abort(self) -> None:
        """End it, as if it had not been."""


class Cluster(Protocol):
    """Where a bus lives. Names here are those of the bus: without the run's prefix."""

    def bus(self) -> Bus:
        """A further handle of the same run."""

    def create(self, topic: str, partitions: int) -> None:
        """Make a topic."""

    def limit(self, topic: str, max_bytes: int) -> None:
        """Take no message of more than about that size from now on."""

    def recreate(self, topic: str, partitions: int) -> None:
        """Delete it and make it anew."""

    def trim(self, partition: Partition, begin: int) -> None:
        """Remove what lies below `begin`."""

    def begin(self, transactional_id: str) -> RawTransaction:
        """An open transaction."""

    def mortal_bus(self) -> Bus:
        """A bus whose consumers `expel` works on."""

    def expel(self, consumer: GroupConsumer) -> None:
        """Let the group drop a member behind its back."""


class MemoryCluster:
    """`Cluster` in this process."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._log = MemoryLog()

    def bus(self) -> Bus:
        return MemoryBus(self._log, self._run)

    mortal_bus = bus

    def create(self, topic: str, partitions: int) -> None:
        self._log.create(f"{self._run}.{topic}", partitions)

    recreate = create

    def limit(self, topic: str, max_bytes: int) -> None:
        self._log.configure(f"{self._run}.{topic}", {"max.message.bytes": str(max_bytes)})

    def trim(self, partition: Partition, begin: int) -> None:
        self._log.trim(Partition(f"{self._run}.{partition.topic}", partition.number), begin)

    def begin(self, transactional_id: str) -> RawTransaction:
        full_id = f"{self._run}.{transactional_id}"
        epoch = self._log.initialise(full_id)
        return _MemoryTransaction(self._log, self._run, self._log.begin(full_id, epoch))

    def expel(self, consumer: GroupConsumer) -> None:
        assert isinstance(consumer, MemoryGroupConsumer)
        consumer.expel()


class _MemoryTransaction:
    def __init__(self, log: MemoryLog, run: str, transaction: Transaction) -> None:
        self._log = log
        self._run = run
        self._transaction = transaction

    def send(
        self, topic: str, partition: int, key: bytes, value: bytes, headers: Mapping[str, bytes]
    ) -> None:
        where = Partition(f"{self._run}.{topic}", partition)
        self._log.append(self._transaction, Message(where, -1, key, value, headers, 0))

    def add_offsets(
        self, group: str, consumer: GroupConsumer, offsets: Mapping[Partition, Committed]
    ) -> None:
        full = {Partition(f"{self._run}.{p.topic}", p.number): at for p, at in offsets.items()}
        self._log.add_offsets(self._transaction, f"{self._run}.{group}", full)

    def commit(self) -> None:
        self._log.end(self._transaction, State.COMMITTED)

    def abort(self) -> None:
        self._log.end(self._transaction, State.ABORTED)


class KafkaCluster:
    """`Cluster` on a real broker."""

    def __init__(self, bootstrap: str, run: str) -> None:
        self._bootstrap = bootstrap
        self._run = run
        self._admin = AdminClient({"bootstrap.servers": bootstrap})

    def bus(self) -> Bus:
        return KafkaBus(self._bootstrap, self._run, transaction_timeout_s=DEADLINE_S)

    def mortal_bus(self) -> Bus:
        options = {"max.poll.interval.ms": str(round(_EXPELLED_AFTER_S * 1000))}
        return KafkaBus(
            self._bootstrap, self._run, options=options, transaction_timeout_s=DEADLINE_S
        )

    def create(self, topic: str, partitions: int) -> None:
        name = f"{self._run}.{topic}"
        new = NewTopic(name, num_partitions=partitions, replication_factor=1)
        self._admin.create_topics([new])[name].result(DEADLINE_S)
        self._wait_for(name, partitions)

    def limit(self, topic: str, max_bytes: int) -> None:
        entry = ConfigEntry(
            "max.message.bytes",
            str(max_bytes),
            incremental_operation=AlterConfigOpType.SET,
        )
        resource = ConfigResource(
            ConfigResource.Type.TOPIC, f"{self._run}.{topic}", incremental_configs=[entry]
        )
        self._admin.incremental_alter_configs([resource])[resource].result(DEADLINE_S)

    def recreate(self, topic: str, partitions: int) -> None:
        name = f"{self._run}.{topic}"
        self._admin.delete_topics([name])[name].result(DEADLINE_S)
        self._wait_for(name, 0)
        self.create(topic, partitions)

    def _wait_for(self, name: str, partitions: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while len(self._admin.list_topics(name, timeout=10).topics[name].partitions) != partitions:
            assert time.monotonic() < deadline, f"topic {name} never had {partitions} partitions"
            time.sleep(0.05)

    def trim(self, partition: Partition, begin: int) -> None:
        tp = TopicPartition(f"{self._run}.{partition.topic}", partition.number, begin)
        self._admin.delete_records([tp])[tp].result(DEADLINE_S)

    def begin(self, transactional_id: str) -> RawTransaction:
        client = Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "transactional.id": f"{self._run}.{transactional_id}",
                "transaction.timeout.ms": str(round(DEADLINE_S * 1000)),
            }
        )
        client.init_transactions(DEADLINE_S)
        client.begin_transaction()
        return _KafkaTransaction(client, self._run)

    def expel(self, consumer: GroupConsumer) -> None:
        time.sleep(_EXPELLED_AFTER_S + 2.0)


class _KafkaTransaction:
    def __init__(self, client: Any, run: str) -> None:
        self._client = client
        self._run = run

    def send(
        self, topic: str, partition: int, key: bytes, value: bytes, headers: Mapping[str, bytes]
    ) -> None:
        name = f"{self._run}.{topic}"
        self._client.produce(name, value, key, partition, headers=list(headers.items()))
        assert self._client.flush(DEADLINE_S) == 0

    def add_offsets(
        self, group: str, consumer: GroupConsumer, offsets: Mapping[Partition, Committed]
    ) -> None:
        assert isinstance(consumer, KafkaGroupConsumer)
        tps = [
            TopicPartition(f"{self._run}.{p.topic}", p.number, at.offset, at.metadata)
            for p, at in offsets.items()
        ]
        self._client.send_offsets_to_transaction(tps, consumer.group_metadata(), DEADLINE_S)

    def commit(self) -> None:
        self._client.commit_transaction(DEADLINE_S)

    def abort(self) -> None:
        self._client.abort_transaction(DEADLINE_S)
