"""The monitor as a process on a real broker: its answers over HTTP, and that it leaves no trace."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from rlstreams.schemas.events import Event, StepCompleted, WorkerReport
from rlstreams.show.health.health import SMALL
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.bus import Producer
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import (
    DEAD_LETTERS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    STEPS,
    WORKER_EVENTS,
    Topic,
)
from tests import factories
from tests.integration.monitor_process import DEADLINE_S, Monitored

STALL_S = 2.0


@pytest.fixture
def bus(broker: str, run_id: str) -> Iterator[KafkaBus]:
    """A run with its topics."""
    apply(broker, run_id, TopicPlan(rollout_workers=1, logprob_workers=1, partitions_per_worker=2))
    with KafkaBus(broker, run_id) as bus:
        yield bus


@pytest.fixture
def monitored(broker: str, run_id: str, bus: KafkaBus, tmp_path: Path) -> Iterator[Monitored]:
    """Ended, whatever the test did."""
    file = tmp_path / "run.toml"
    file.write_text(f'[run]\nid = "{run_id}"\n[broker]\nbootstrap = "{broker}"\n', "utf-8")
    monitored = Monitored(file, f"--deadlines.stall_s={STALL_S}")
    yield monitored
    monitored.end()


def report(role: str, instance: str = "a") -> tuple[Topic, WorkerReport]:
    states = {"rollout": ("working", ""), "trainer": ("waiting", "for samples")}
    state, detail = states[role]
    event = factories.worker_report(
        worker=f"{role}-0", role=role, instance=instance, state=state, detail=detail,
        counters={"samples": 1.0}, at_ms=now_ms(),
    )  # fmt: skip
    return WORKER_EVENTS, event


def step(number: int) -> tuple[Topic, StepCompleted]:
    at_ms = now_ms()
    event = factories.step_completed(
        number, epoch=1, policy_version=number, started_at_ms=at_ms - 100, finished_at_ms=at_ms
    )
    return STEPS, event


def send(producer: Producer, pairs: Sequence[tuple[Topic, Event]]) -> None:
    producer.commit([outgoing(topic, event) for topic, event in pairs])


def published() -> list[tuple[Topic, Event]]:
    """A small run."""
    at_ms = now_ms()
    return [
        (STEPS, factories.trainer_started(epoch=1, step_target=100, started_at_ms=at_ms)),
        *(step(number) for number in range(1, 6)),
        (STEPS, factories.groups_dropped(epoch=1, dropped_at_ms=at_ms)),
        *((POLICY_VERSIONS, factories.policy_published(v, published_at_ms=at_ms)) for v in (0, 1)),
        *((POLICY_PULLS, factories.policy_loaded(v, loaded_at_ms=at_ms)) for v in (0, 1, 2)),
        # Larger than a batch of the broker's may be, so it comes in parts.
        (DEAD_LETTERS, factories.dead_letter(value=os.urandom(2_000_000), at_ms=at_ms)),
        report("rollout"),
        report("rollout", "b"),
        report("trainer"),
    ]


def test_a_monitor_tells_when_a_run_stands(
    broker: str, run_id: str, bus: KafkaBus, monitored: Monitored
) -> None:
    """503 with the blocked role, 200 with the next step; it leaves no trace at the broker."""
    admin = AdminClient({"bootstrap.servers": broker})
    topics = set(admin.list_topics(timeout=60).topics)
    zombie = confluent_kafka.Producer(
        {"bootstrap.servers": broker, "transactional.id": f"{run_id}.zombie.0", "log_level": 2}
    )
    zombie.init_transactions(60)
    with bus.producer("any.0") as pen:
        send(pen, published())
        zombie.begin_transaction()
        zombie.produce(f"{run_id}.{DEAD_LETTERS.name}", b"never committed")
        zombie.flush(60)
        zombie.abort_transaction(60)

        def work() -> None:
            send(pen, [report("rollout", "b"), report("trainer")])

        ready = monitored.until("/health", lambda status, body: body["step"] == 5, work)
        assert 100 == ready["step_target"]
        assert (5, 0) == (ready["policy_version"], ready["unreadable"])

        def stands(status: int, body: Any) -> bool:
            return status == 503 and any("no step for" in text for text in body["problems"])

        problems = monitored.until("/health", stands, work)["problems"]
        assert any("(the last was 5): blocked at prompts" in text for text in problems)
        newest = 5

        def advance() -> None:
            nonlocal newest
            newest += 1
            send(pen, [step(newest), report("rollout", "b"), report("trainer")])

        assert [] == monitored.until("/health", lambda s, _: s == 200, advance)["problems"]
    (group,) = groups(admin, f"{run_id}.monitor-")
    monitored.process.send_signal(signal.SIGTERM)
    assert 0 == monitored.process.wait(DEADLINE_S), monitored.output
    assert [] == committed(broker, group, run_id)
    after = set(admin.list_topics(timeout=60).topics)
    assert set() == {name for name in after - topics if run_id in name}


def groups(admin: AdminClient, prefix: str) -> list[str]:
    listed = admin.list_consumer_groups(request_timeout=60).result(60).valid
    return [group.group_id for group in listed if group.group_id.startswith(prefix)]


def committed(broker: str, group: str, run_id: str) -> list[int]:
    """Offsets that the group has left at the broker."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": broker, "group.id": group})
    asked = [TopicPartition(f"{run_id}.{topic.name}", 0) for topic in SMALL]
    try:
        return [
            found.offset for found in consumer.committed(asked, timeout=60) if found.offset >= 0
        ]
    finally:
        consumer.close()


def test_a_monitor_says_which_port_is_taken(broker: str, run_id: str, bus: KafkaBus) -> None:
    from rlstreams.show.health.app import serve
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.workers.config.run import RunConfig, RunSection

    port = int(broker.rpartition(":")[2])
    config = RunConfig(run=RunSection(id=run_id))
    with pytest.raises(ConfigError, match=f"--port {port} cannot be had"):
        serve(config, broker, {}, {}, host="127.0.0.1", port=port, say=lambda _: None)
