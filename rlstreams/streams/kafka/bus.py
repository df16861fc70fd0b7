"""The log on Apache Kafka: connections, settings, and questions about topics and groups.

Settings and their reasons: read_committed everywhere, because only then does `committed()` wait for
a predecessor's open transaction; a reader never resets its offset by itself; parts of 900 kB stay
alone in their batch of at most 1 MB, which is what a broker's default limit applies to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec

from rlstreams.streams.kafka.appender import KafkaAppender
from rlstreams.streams.kafka.consumer import KafkaGroupConsumer
from rlstreams.streams.kafka.errors import (
    NO_TOPIC,
    Login,
    Outage,
    broker_error,
    error_of,
    is_silence,
    lost_transaction,
    until,
)
from rlstreams.streams.kafka.feed import ASK_S, KafkaFeed
from rlstreams.streams.kafka.positions import committed_at, stable
from rlstreams.streams.kafka.producer import KafkaProducer
from rlstreams.streams.kafka.reachable import NOT_KAFKA, refuse_silence
from rlstreams.streams.kafka.reader import KafkaReader
from rlstreams.streams.log.bus import Closing
from rlstreams.streams.log.catalogue import Catalogue
from rlstreams.streams.log.errors import BrokerError, FencedError, TopicMismatchError
from rlstreams.streams.log.record import Committed, Partition, RawRecord
from rlstreams.streams.log.rights import READERS
from rlstreams.streams.log.topics import TOPICS

T = TypeVar("T")

LOOK_UP_S = 2.0  # one look-up; a refused login shows only beside it, in the client's events
ANSWER_S = 30.0  # a question to the broker, retries included
_SETTLE_S = 5.0  # beyond the transaction timeout: the broker's own clean-up interval
# The client logs each refused connection ten times a second, on stderr; we get the important ones
# as errors.
_CRITICAL = 2

# By default a client pauses twice as long before each further try, up to 10 s: it finds a broker
# that was away for 4 s some 5 s after its return (tests/bench/broker_return.py). With much shorter
# pauses many clients would ask a broker that is only slow for handshakes.
_RECONNECT = {"reconnect.backoff.max.ms": "2000"}
_MAX_POLL = "max.poll.interval.ms"
_CONSUMER = {
    _MAX_POLL: "300000",
    "enable.auto.commit": "false",
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
    # A small queue, refilled at once: with the default pause of 1 s it would starve.
    "queued.max.messages.kbytes": "16384",
    "fetch.queue.backoff.ms": "10",
}
# Readers go through whole topics. Twice the room, in steps twice as large, spares the broker a
# quarter of its time; with more of both the memory leaves the processor's cache.
_READER = {"queued.max.messages.kbytes": "32768", "max.partition.fetch.bytes": "2097152"}
# A reader that goes from one partition to the next: a fetch that waits at the end of one, by
# default for 0.5 s, holds up the next.
_SEEKER = {"fetch.wait.max.ms": "10"}
_PRODUCER = {
    "enable.idempotence": "true",
    "partitioner": "murmur2_random",  # as Java and kafka-python
    # Every transaction ends in a flush, which sends lingering batches at once. Until then a
    # longer pause only fills batches: after 5 ms they leave half empty, and each costs a request.
    "linger.ms": "50",
    "batch.size": "1000000",
    "compression.type": "none",  # payloads carry their own codec
    "queue.buffering.max.kbytes": "131072",
    # A partition takes a producer's first batch with any sequence number. With several in flight,
    # where the first is refused (a topic just created, a leader that moves) and the second is not,
    # the first one's retry counts as a duplicate: acknowledged, and not in the log (3 of 10 runs).
    "max.in.flight.requests.per.connection": "1",
    # The next transaction waits for the markers of the one before by asking again: with the default
    # of 100 ms a commit right behind another took 105 ms, so it takes 15.
    "retry.backoff.ms": "5",
    # By default a broker that metadata leaves out while it restarts is dropped, yet stays cached as
    # the group's coordinator, and sending offsets waits for it for ever (librdkafka issue 5511).
    "metadata.recovery.strategy": "none",
}


class KafkaBus(Closing):
    """The port `Bus` on Kafka.

    Args:
        bootstrap: `host:port`, several with commas.
        run: prefix of topics, groups and transactional ids.
        options: further settings of every client (TLS, SASL); they override ours.
        commit_s: longest time of one commit, after which its outcome counts as unknown.
        transaction_timeout_s: after it the broker aborts a dead producer's open transaction.
        outage_s: longest wait of polls for an unreachable broker.
        on_read: called with the records that a reader is about to deliver.

    Raises:
        BrokerError: settings that the client refuses.
    """

    def __init__(
        self,
        bootstrap: str,
        run: str,
        *,
        options: Mapping[str, str] = MappingProxyType({}),
        commit_s: float = 30.0,
        transaction_timeout_s: float = 30.0,
        outage_s: float = 60.0,
        on_read: Callable[[Sequence[RawRecord]], None] = lambda _: None,
    ) -> None:
        self._bootstrap = bootstrap
        self._run = run
        self._options = dict(options)
        self._commit_s = commit_s
        self._transaction_timeout_s = transaction_timeout_s
        self._outage_s = outage_s
        self._on_read = on_read
        # Kept: a temporary client is collected before its futures resolve.
        self._login = Login(bootstrap)
        self._admin = self._client(AdminClient, {"error_cb": self._login.seen})
        self._catalogue = Catalogue(self)

    def _client(self, kind: Any, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        common = {
            "bootstrap.servers": self._bootstrap,
            "log_level": str(_CRITICAL),
            **_RECONNECT,
        }
        try:
            return kind({**common, **settings, **self._options})
        except KafkaException as err:
            raise broker_error(error_of(err), "making a client", self._bootstrap) from err

    def _name(self, name: str) -> str:
        return f"{self._run}.{name}"

    def producer(self, transactional_id: str) -> KafkaProducer:
        """Make a producer; wait until its predecessor's transaction is settled.

        Raises:
            FencedError: another one of the same id started at the same time.
            BrokerError: no answer before the deadline.
        """
        full_id = self._name(transactional_id)
        timeout_ms = str(round(self._transaction_timeout_s * 1000))
        settings = {"transactional.id": full_id, "transaction.timeout.ms": timeout_ms}
        client = self._client(Producer, {**_PRODUCER, **settings})
        self._initialise(client, full_id)
        return KafkaProducer(
            client, run=self._run, transactional_id=full_id, commit_s=self._commit_s
        )

    def _initialise(self, client: Any, full_id: str) -> None:  # noqa: ANN401
        deadline = time.monotonic() + self._transaction_timeout_s + ANSWER_S
        while True:
            try:
                client.init_transactions(ASK_S)
            except KafkaException as err:
                error = error_of(err)
                lost = lost_transaction(error, full_id)
                if error.fatal() and isinstance(lost, FencedError):
                    raise lost from err
                if not error.retriable() or time.monotonic() >= deadline:
                    doing = f"initialising transactional id {full_id}"
                    raise broker_error(error, doing, self._bootstrap) from err
            else:
                return

    def appender(self) -> KafkaAppender:
        """See `Bus`."""
        timeout_ms = str(round(self._commit_s * 1000))
        settings = {"linger.ms": "0", "message.timeout.ms": timeout_ms}
        return KafkaAppender(self._client(Producer, {**_PRODUCER, **settings}), run=self._run)

    def consumer(self, group: str, topics: Sequence[str]) -> KafkaGroupConsumer:
        """See `Bus`."""
        for topic in topics:
            self.partitions(topic)
        settings = {"group.id": self._name(group), "group.protocol": "consumer"}
        names = [self._name(topic) for topic in topics]
        return KafkaGroupConsumer(
            lambda: self._feed(settings),
            names,
            stable_s=self._transaction_timeout_s + _SETTLE_S,
            max_poll_s=float(self._options.get(_MAX_POLL, _CONSUMER[_MAX_POLL])) / 1000,
        )

    def reader(self, offsets: Mapping[Partition, int] | None = None) -> KafkaReader:
        """See `Bus`."""
        # The client insists on a group's name; it neither joins nor commits.
        waits = _SEEKER if offsets is None else {}
        feed = self._feed({**_READER, **waits, "group.id": self._name(READERS)})
        return KafkaReader(feed, offsets, self._on_read)

    def _feed(self, settings: Mapping[str, str]) -> KafkaFeed:
        outage = Outage(self._bootstrap, self._outage_s)
        client = self._client(Consumer, {**_CONSUMER, **settings, "error_cb": outage.seen})
        return KafkaFeed(client, self._run, self._bootstrap, outage)

    def partitions(self, topic: str) -> int:
        """See `Bus`."""
        name = self._name(topic)
        found = self._ask(
            lambda: self._admin.list_topics(name, timeout=LOOK_UP_S), f"looking up {name}"
        ).topics[name]
        if found.error is not None or not found.partitions:
            raise TopicMismatchError(
                f"topic {name} does not exist at {self._bootstrap}: create a run's topics by "
                "`rlstreams broker topics CONFIG`, with the same run.id and broker.bootstrap"
            )
        return len(found.partitions)

    def topic_ids(self, topics: Sequence[str]) -> Mapping[str, str]:
        """See `Bus`."""
        return {topic: self._topic_id(topic) for topic in topics}

    def _topic_id(self, topic: str) -> str:
        name = self._name(topic)

        def ask() -> Any:  # noqa: ANN401
            futures = self._admin.describe_topics(TopicCollection([name]), request_timeout=ASK_S)
            return futures[name].result(ASK_S + 1)

        return str(self._ask(ask, f"describing {name}", missing=name).topic_id)

    def settings(self, topic: str) -> Mapping[str, str]:
        """See `Bus`; the broker's defaults included."""
        name = self._name(topic)
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)

        def ask() -> Mapping[str, str]:
            futures = self._admin.describe_configs([resource], request_timeout=ASK_S)
            found = futures[resource].result(ASK_S + 1)
            return {key: entry.value for key, entry in found.items() if entry.value is not None}

        return self._ask(ask, f"describing the settings of {name}", missing=name)

    def cluster_id(self) -> str:
        """The id of the cluster."""
        ask = lambda: self._admin.list_topics(timeout=LOOK_UP_S)  # noqa: E731
        return str(self._ask(ask, "asking for the cluster's id").cluster_id)

    def schemas(self) -> Catalogue:
        """See `Bus`."""
        return self._catalogue

    def beginnings(self, topic: str) -> Mapping[Partition, int]:
        """See `Bus`."""
        return self._offsets(topic, OffsetSpec.earliest())

    def ends(self, topic: str) -> Mapping[Partition, int]:
        """See `Bus`."""
        return self._offsets(topic, OffsetSpec.latest())

    def written_since(self, partition: Partition, at_ms: int) -> tuple[int, int]:
        """See `Bus`."""
        end, begin = (
            self._offsets(
                partition.topic, spec, [partition.number], isolation=IsolationLevel.READ_UNCOMMITTED
            )[partition]
            for spec in (OffsetSpec.latest(), OffsetSpec.for_timestamp(at_ms))
        )
        return (end if begin < 0 else begin), end  # below 0: no record is as young

    def _offsets(
        self,
        topic: str,
        spec: Any,  # noqa: ANN401
        numbers: Sequence[int] = (),
        *,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> Mapping[Partition, int]:
        """Return offsets by partition; no `numbers`: of all partitions."""
        name = self._name(topic)
        tps = [TopicPartition(name, n) for n in numbers or range(self.partitions(topic))]
        found = self._listed(tps, spec, isolation, f"the offsets of {name}", missing=name)
        return {Partition(topic, tp.partition): offset for tp, offset in found.items()}

    def held(self) -> Sequence[Any]:
        """Return the client's partitions of this run in which a transaction is open.

        There the last stable offset lies before the end.
        """
        ask = lambda: self._admin.list_topics(timeout=LOOK_UP_S).topics  # noqa: E731
        there, names = self._ask(ask, "listing the topics"), {self._name(t.name) for t in TOPICS}
        tps = [
            TopicPartition(name, n) for name in names & there.keys() for n in there[name].partitions
        ]
        if not tps:
            return ()
        latest, doing = OffsetSpec.latest(), f"the ends of {self._run}"
        ends = self._listed(tps, latest, IsolationLevel.READ_UNCOMMITTED, doing)
        stable = self._listed(tps, latest, IsolationLevel.READ_COMMITTED, doing)
        return [tp for tp in tps if stable[tp] < ends[tp]]

    def _listed(
        self,
        tps: Sequence[Any],
        spec: Any,  # noqa: ANN401
        isolation: IsolationLevel,
        what: str,
        *,
        missing: str = "",
    ) -> Mapping[Any, int]:
        def ask() -> Mapping[Any, int]:
            wanted = dict.fromkeys(tps, spec)
            futures = self._admin.list_offsets(
                wanted, isolation_level=isolation, request_timeout=ASK_S
            )
            return {tp: future.result(ASK_S + 1).offset for tp, future in futures.items()}

        return self._ask(ask, f"listing {what}", missing=missing)

    def committed(self, group: str, topic: str) -> Mapping[Partition, Committed]:
        """See `Bus`."""
        name = self._name(topic)
        tps = [TopicPartition(name, number) for number in range(self.partitions(topic))]
        client = self._client(Consumer, {**_CONSUMER, "group.id": self._name(group)})
        deadline = time.monotonic() + self._transaction_timeout_s + _SETTLE_S
        doing = f"asking for the offsets of group {self._name(group)} in {name}"
        try:
            found = until(deadline, lambda: stable(client, tps), doing, self._bootstrap)
        finally:
            client.close()
        answers = {Partition(topic, tp.partition): committed_at(tp) for tp in found}
        return {partition: at for partition, at in answers.items() if at is not None}

    def _ask(self, call: Callable[[], T], doing: str, *, missing: str = "") -> T:
        def asked() -> T:
            self._admin.poll(0)  # serves the client's events, for example of a refused login
            self._login.check()
            try:
                return call()
            except KafkaException as err:
                if missing and error_of(err).code() in NO_TOPIC:
                    raise TopicMismatchError(
                        f"topic {missing} does not exist at {self._bootstrap}"
                    ) from err
                raise

        try:
            return until(time.monotonic() + ANSWER_S, asked, doing, self._bootstrap)
        except BrokerError as err:
            if not is_silence(err):
                raise
            refuse_silence(self._bootstrap)
            raise BrokerError(f"{err}; {NOT_KAFKA}") from err

    def close(self) -> None:
        """Do nothing: producers, consumers and readers are closed by their makers."""
