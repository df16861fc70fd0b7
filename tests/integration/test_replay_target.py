"""A replay into a run that has records is refused before anything of its topics is changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kafka.admin import ConfigResource, KafkaAdminClient

from rlstreams.debug.replay.fresh import fresh_run
from rlstreams.streams.kafka.admin import apply, listing
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import TRAJECTORIES
from rlstreams.workers.bootstrap.parts import topic_plan
from rlstreams.workers.config.run import RunConfig, RunSection
from tests import factories
from tests.contract.polling import within

RETENTION = "3600000"


def state(broker: str, run_id: str) -> tuple[str, object]:
    name = f"{run_id}.{TRAJECTORIES.name}"
    admin = KafkaAdminClient(bootstrap_servers=broker)
    found = admin.describe_configs([ConfigResource("TOPIC", name)])["topic"][name]
    admin.close()
    topics = listing(broker, run_id)
    with KafkaBus(broker, run_id) as bus:
        return found["retention.ms"]["value"], (topics, [bus.ends(topic) for topic in topics])


def test_topics_of_a_run_that_lives_are_left_as_they_are(
    broker: str, run_id: str, tmp_path: Path
) -> None:
    """None is made that it lacks, no retention is lengthened; then a fresh one is taken, twice."""
    config = RunConfig(run=RunSection(id=run_id, dir=str(tmp_path / "run")))
    config = replace(config, broker=replace(config.broker, bootstrap=broker))
    apply(broker, run_id, topic_plan(config))
    admin = KafkaAdminClient(bootstrap_servers=broker)
    admin.delete_topics([f"{run_id}.worker-events"])
    name = f"{run_id}.{TRAJECTORIES.name}"
    admin.alter_configs([ConfigResource("TOPIC", name, {"retention.ms": RETENTION})])
    admin.close()
    with KafkaBus(broker, run_id) as bus, bus.producer("rollout-0") as producer:
        producer.commit([outgoing(TRAJECTORIES, factories.trajectory())])

    def changed() -> tuple[str, object] | None:
        """A broker answers what it was told a moment later."""
        found = state(broker, run_id)
        return found if found[0] == RETENTION else None

    before = within(30.0, changed, "the retention that was set")

    told = rf"run.id '{run_id}' has records in trajectories already.*--as NAME"
    with pytest.raises(ConfigError, match=told), fresh_run(config):
        pytest.fail("taken")
    assert before == state(broker, run_id)
    assert not (tmp_path / "run/config.json").exists()

    other = replace(config, run=RunSection(id=f"{run_id}-other", dir=str(tmp_path / "other")))
    for _ in range(2):  # nothing was written the first time
        with fresh_run(other) as bus:
            assert not any(bus.ends("steps").values())
