"""Peers settle the transaction of a worker that joined by itself and died, on a real broker."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer

from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.errors import error_of, lost_transaction
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import FencedError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import WORKER_EVENTS
from rlstreams.workers.bootstrap import peers
from rlstreams.workers.bootstrap.parts import open_bus
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.context import Context
from tests import factories

STANDS_S = 1.0  # in this test; a Kafka client's own limit is 30 s, as the workers'
WITHIN_S = 15.0
EXAMPLE = Path(__file__).parents[2] / "infra/examples/demo.toml"


def in_the_middle(broker: str, run: str, transactional_id: str) -> Producer:
    """A producer that has written a record, and has not committed it."""
    name = f"{run}.{transactional_id}"
    producer = Producer({"bootstrap.servers": broker, "transactional.id": name, "log_level": 0})
    producer.init_transactions(30.0)
    producer.begin_transaction()
    producer.produce(f"{run}.{WORKER_EVENTS.name}", b"half", b"of it", partition=0)
    assert not producer.flush(30.0)
    return producer


def die_in_the_middle(broker: str, run: str, transactional_id: str) -> None:
    _producer = in_the_middle(broker, run, transactional_id)
    os.kill(os.getpid(), signal.SIGKILL)


def reports_read(bus: Bus) -> Callable[[], bool]:
    """Whether a record that is written now has been delivered: nothing open lies before it."""
    partition = Partition(WORKER_EVENTS.name, 0)
    with bus.appender() as appender:
        place = appender.append(outgoing(WORKER_EVENTS, factories.worker_report())).result(30)
    reader = bus.reader({partition: place.offset})
    return lambda: bool(reader.poll(10, 0.1))


@pytest.fixture
def config(broker: str, run_id: str, tmp_path: Path) -> RunConfig:
    apply(broker, run_id, TopicPlan(rollout_workers=1, logprob_workers=1))
    words = [f"run.id={run_id}", f"run.dir={tmp_path}", f"broker.bootstrap={broker}"]
    return load([EXAMPLE], words)


def test_who_died_in_a_commit_is_settled_and_who_lives_is_left(
    broker: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead one hides nothing for long; a slow one ends as fenced, and can start again; those
    that a configuration counts, and other roles', are somebody else's."""
    monkeypatch.setattr(peers, "STANDS_S", STANDS_S)
    monkeypatch.setattr(peers, "LOOK_S", STANDS_S)
    run = config.run.id
    dead = multiprocessing.get_context("spawn").Process(
        target=die_in_the_middle, args=(broker, run, "rollout.1000")
    )
    dead.start()
    dead.join(60)
    assert dead.exitcode == -signal.SIGKILL
    counted, other = (in_the_middle(broker, run, name) for name in ("rollout.1", "logprob.1000"))
    slow = in_the_middle(broker, run, "rollout.1001")
    bus = open_bus(config)
    context = Context(config=config, bus=bus, role="rollout", ordinal=0, instance="peer")
    is_read = reports_read(bus)
    began_s = time.monotonic()
    with peers.peers_settled(context):
        time.sleep(STANDS_S + peers.LOOK_S + peers.APART_S + 2.0)
        for alive in (counted, other):  # nobody took their names
            alive.commit_transaction(10.0)
        while not is_read():
            assert time.monotonic() - began_s < WITHIN_S, "what the dead one hid is not read"
    with pytest.raises(KafkaException) as fenced:
        slow.commit_transaction(10.0)
    assert isinstance(lost_transaction(error_of(fenced.value), "rollout.1001"), FencedError)
    in_the_middle(broker, run, "rollout.1001").commit_transaction(10.0)
    bus.close()
