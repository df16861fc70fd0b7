"""The plan of topics and what is refused, without a broker."""

from __future__ import annotations

import pytest

from rlstreams.streams.kafka.admin import refuse_other_counts, version_warning
from rlstreams.streams.log.errors import TopicMismatchError
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import (
    CALLS,
    CONTROL,
    OUTCOMES,
    PROMPTS,
    SCORED,
    STEPS,
    TOPICS,
    TRAJECTORIES,
    WORKER_EVENTS,
)


def make_plan(**changes: int) -> TopicPlan:
    return TopicPlan(**{"rollout_workers": 3, "logprob_workers": 2, **changes})


def test_payload_topics_have_partitions_for_their_readers_and_all_others_one() -> None:
    """Counts follow the workers that read; everything else is a total order."""
    plan = make_plan()

    counts = {topic.name: plan.partitions(topic) for topic in TOPICS}

    payload = {
        PROMPTS.name: 6,
        CALLS.name: 6,
        OUTCOMES.name: 6,
        TRAJECTORIES.name: 4,
        SCORED.name: 4,
    }
    assert counts == {topic.name: payload.get(topic.name, 1) for topic in TOPICS}


def test_prompts_never_get_fewer_than_two_partitions_per_rollout_worker() -> None:
    """One partition per worker would stop a worker whose straggler pauses it."""
    plan = make_plan(partitions_per_worker=1)

    assert plan.partitions(PROMPTS) == 6
    assert plan.partitions(TRAJECTORIES) == 2


def test_retention_follows_the_table() -> None:
    """Steps are kept for ever, payloads by bytes and time, control by key."""
    plan = make_plan(payload_ms=1000, payload_bytes=5000, short_ms=10)

    assert plan.settings(STEPS) == {"retention.ms": "-1", "retention.bytes": "-1"}
    assert plan.settings(TRAJECTORIES) == {"retention.ms": "1000", "retention.bytes": "5000"}
    assert plan.settings(WORKER_EVENTS) == {"retention.ms": "10"}
    assert plan.settings(CONTROL) == {"cleanup.policy": "compact"}


def test_three_replicas_need_two_in_sync() -> None:
    """With three replicas an acknowledged record is on at least two brokers."""
    assert make_plan(replication=3).settings(CONTROL)["min.insync.replicas"] == "2"
    assert "min.insync.replicas" not in make_plan(replication=1).settings(CONTROL)


def test_another_partition_count_is_refused_with_both_numbers() -> None:
    """The message names topic, found and wanted; missing topics are no mismatch."""
    found = {"r.prompts": 4, "r.steps": 1}
    wanted = {"r.prompts": 6, "r.steps": 1, "r.control": 1}

    with pytest.raises(TopicMismatchError, match=r"r\.prompts has 4 partitions.* wants 6"):
        refuse_other_counts(found, wanted)
    refuse_other_counts({"r.steps": 1}, wanted)


@pytest.mark.parametrize(("level", "is_warned"), [(29, False), (30, True), (31, False)])
def test_only_a_broker_of_4_3_is_warned_about(level: int, is_warned: bool) -> None:
    """4.2 ends at level 29, 4.3 at 30."""
    assert is_warned == ("4.3.x" in version_warning(level))
