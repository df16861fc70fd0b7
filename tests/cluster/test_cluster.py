"""A run on three nodes of Kafka: one after the other fails, and nothing is lost or doubled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.streams.kafka.admin import apply, listing
from rlstreams.streams.log.topic_plan import TopicPlan
from tests.cluster.cluster import NUM_NODES, Cluster, Fault
from tests.cluster.run import ClusterRun

pytestmark = pytest.mark.slow  # three JVMs
NODES = range(1, NUM_NODES + 1)


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path, run_id: str) -> Iterator[ClusterRun]:
    """A run that has made its first steps."""
    begun = ClusterRun(cluster.bootstrap, tmp_path, run_id)
    begun.goes_on()
    yield begun
    begun.close()


def fail(run: ClusterRun, cluster: Cluster, faults: list[tuple[int, Fault]]) -> None:
    """One after the other; the run makes steps while each is away, and after all are back."""
    for node, fault in faults:
        with cluster.without(node, fault):
            run.goes_on()
    run.goes_on()
    report = run.end()
    assert report.ok, report.text()
    assert (0, 0) == (report.lost, report.duplicates)
    assert report.steps >= run.step


def test_each_node_fails_in_its_own_way(run: ClusterRun, cluster: Cluster) -> None:
    """One is killed, one stopped and started, one cut off: steps go on, the audit is clean."""
    fail(run, cluster, list(zip(NODES, Fault, strict=True)))


def test_each_node_fails_in_every_way(run: ClusterRun, cluster: Cluster) -> None:
    """The same with all nodes crossed with all faults."""
    fail(run, cluster, list(itertools.product(NODES, Fault)))


def test_topics_of_a_run_lie_on_every_node(cluster: Cluster, run_id: str) -> None:
    """`broker.replication = 3` makes three replicas, and two of them acknowledge each write."""
    plan = TopicPlan(rollout_workers=1, logprob_workers=1, replication=3)
    apply(cluster.bootstrap, run_id, plan)

    topics = listing(cluster.bootstrap, run_id).values()
    copies = [one for topic in topics for one in topic.copies.values()]
    assert {3} == {len(one.assigned) for one in copies}
    assert {"2"} == {topic.settings["min.insync.replicas"] for topic in topics}
