"""The plan of topics and what is refused, without a broker."""

from __future__ import annotations

import pytest

from rlstreams.streams.kafka.admin import refuse_counts, version_warning
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


def test_a_run_begins_with_room_for_workers_to_come() -> None:
    """No worker is refused for a count: there are partitions for it, unless more were planned."""
    plan = make_plan(headroom=64)
    assert (64, 64, 1) == (
        plan.partitions(PROMPTS),
        plan.partitions(SCORED),
        plan.partitions(STEPS),
    )
    assert 200 == make_plan(headroom=64, rollout_workers=100).partitions(PROMPTS)


def test_the_partitions_of_a_run_stay_as_they_are() -> None:
    """Also with other numbers of workers; what an older release did not make goes with its like."""
    found = {"prompts": 4, "trajectories": 2, "steps": 1}
    for plan in (make_plan(headroom=64), make_plan(rollout_workers=1, logprob_workers=1)):
        refuse_counts("r", plan, found)
        counts = {topic.name: count for topic, count in plan.beside(found).items()}
        alike = {"prompts": 4, "calls": 4, "outcomes": 4, "trajectories": 2}
        assert alike | {"scored-trajectories": 2, "steps": 1} == {
            name: counts[name] for name in (*alike, "scored-trajectories", "steps")
        }


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"prompts": 2}, r"r\.prompts has 2 partitions and rollout\.workers is 3: 1 of them would"),
        ({"trajectories": 1}, r"r\.trajectories has 1 partitions and logprob\.workers is 2: 1 of"),
        ({"prompts": 6, "calls": 8}, r"r\.calls has 8 partitions and not 6"),
        ({"steps": 2}, r"r\.steps has 2 partitions and not 1"),
    ],
)
def test_fewer_partitions_than_workers_are_refused_with_both_numbers(
    found: dict[str, int], told: str
) -> None:
    """And topics that do not go together; missing topics are no mismatch."""
    with pytest.raises(TopicMismatchError, match=told):
        refuse_counts("r", make_plan(), found)
    refuse_counts("r", make_plan(), {"steps": 1})


@pytest.mark.parametrize(("level", "is_warned"), [(29, False), (30, True), (31, False)])
def test_only_a_broker_of_4_3_is_warned_about(level: int, is_warned: bool) -> None:
    """4.2 ends at level 29, 4.3 at 30."""
    assert is_warned == ("4.3.x" in version_warning(level))
