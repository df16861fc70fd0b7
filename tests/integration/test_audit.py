"""The audit on a real broker: open transactions by name."""

from __future__ import annotations

from functools import partial

import confluent_kafka
import pytest

from rlstreams.cli.audit import OVERDUE_S, breach
from rlstreams.show.health.stall_watch import held_by
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.open_transactions import open_transactions
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import PROMPTS
from rlstreams.workers.config.run import RunConfig, RunSection
from tests.contract.polling import within


@pytest.fixture
def run(broker: str, run_id: str) -> str:
    """A run with its topics."""
    apply(broker, run_id, TopicPlan(rollout_workers=1, logprob_workers=1, partitions_per_worker=2))
    return run_id


def test_a_transaction_that_stays_open_is_named(broker: str, run: str) -> None:
    """By audit and stall watch: partition, offset, producer, worker; a young one is no breach."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": broker, "transactional.id": f"{run}.prompts.0"}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(f"{run}.{PROMPTS.name}", b"unfinished", partition=1)
    producer.flush(10)
    try:
        ask = partial(open_transactions, broker, run, older_than_s=0, watch_s=0.1)
        (one,) = within(30, lambda: ask() or None, "an open transaction")
        assert () == open_transactions(broker, run, older_than_s=OVERDUE_S)
        found = breach(one)
        config = RunConfig(run=RunSection(id=run))
        (held,) = held_by(broker, config)
    finally:
        producer.abort_transaction(10)
    assert f"{run}.prompts[1]" == found.id
    assert "nothing is read from offset 0 on; producer id " in found.detail
    assert ("prompts-0", ("prompts[1]",)) == (held.worker, held.partitions)
