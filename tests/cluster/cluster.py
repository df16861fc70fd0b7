"""Three nodes of Kafka that agree with each other, and what can happen to one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ClusterMetadata

from rlstreams.streams.broker.config import new_cluster_id, server_properties
from rlstreams.streams.broker.ports import free_ports
from tests.containers import KafkaNode, make_network, sweep, wait_until

NUM_NODES = 3
READY_S = 120.0  # six Java starts on a busy machine
WHOLE_S = 90.0  # a node starts again, catches up, and is in sync everywhere
NOTICE_S = 30.0  # the others notice that a node is gone
ANSWER_S = 2.0

# As the embedded broker has them, but for what one node says of itself and of having no others.
# Replication 3 and two in sync are the defaults of a cluster's own topics.
_ALONE = re.compile(r"node\.id|listeners|controller\.quorum.*|.*\.replication\.factor|.*\.min\.isr")
_EMBEDDED = server_properties(Path("data"), 1, 2).splitlines()
SETTINGS = {
    **{
        name: value
        for name, value in (line.split("=", 1) for line in _EMBEDDED)
        if not _ALONE.fullmatch(name)
    },
    "inter.broker.listener.name": "INTERNAL",
    "listener.security.protocol.map": (
        "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,INTERNAL:PLAINTEXT"
    ),
    "log.dirs": "/var/lib/kafka/data",
    # Instead of 30 s: how soon writes no longer wait for a replica that is gone.
    "replica.lag.time.max.ms": "5000",
}


class Fault(StrEnum):
    """What happens to one node."""

    KILL = "kill"  # SIGKILL, started again
    RESTART = "restart"  # SIGTERM, started again
    PARTITION = "partition"  # off the network and back


@dataclass(frozen=True, slots=True, kw_only=True)
class Felt:
    """One fault as it went."""

    fault: Fault
    node: int
    noticed_s: float  # until the others led around it
    whole_s: float  # from its return until every replica was in sync


@dataclass(slots=True)
class Cluster:
    """The nodes, in order; all have started."""

    nodes: list[KafkaNode]
    felt: list[Felt] = field(default_factory=list)

    @property
    def bootstrap(self) -> str:
        """Addresses of all nodes."""
        return ",".join(node.address for node in self.nodes)

    def is_whole(self) -> bool:
        """Every node sees all nodes, and every partition with all its replicas in sync.

        Each is asked by itself: one that comes back would answer for a while as if it had never
        been away.
        """
        return all(_is_whole(seen_by(node)) for node in self.nodes)

    def leads_around(self, node_id: int) -> bool:
        """The other nodes see that one no longer."""
        views = [seen_by(node) for i, node in enumerate(self.nodes, 1) if i != node_id]
        return all(view is not None and node_id not in view.brokers for view in views)

    @contextmanager
    def without(self, node_id: int, fault: Fault) -> Iterator[None]:
        """Inside: the node is away and the others know. After: all is in sync again.

        Raises:
            AssertionError: a deadline passed; says which, with the node's log.
        """
        node = self.nodes[node_id - 1]
        {Fault.KILL: node.kill, Fault.RESTART: node.stop_cleanly, Fault.PARTITION: node.cut_off}[
            fault
        ]()
        what = f"{fault} of node {node_id}"
        noticed_s = wait_until(
            lambda: self.leads_around(node_id), NOTICE_S, f"{what}: noticed by the others"
        )
        yield
        (node.join_again if fault is Fault.PARTITION else node.start_again)()
        try:
            whole_s = wait_until(self.is_whole, WHOLE_S, f"{what}: all replicas in sync again")
        except AssertionError as err:
            err.add_note(node.log_tail())
            raise
        self.felt.append(Felt(fault=fault, node=node_id, noticed_s=noticed_s, whole_s=whole_s))


def seen_by(node: KafkaNode) -> ClusterMetadata | None:
    """The cluster as this node knows it; None if it does not answer."""
    # A new client knows no other node when it asks.
    client = AdminClient({"bootstrap.servers": node.address, "log_level": "2"})
    try:
        return client.list_topics(timeout=ANSWER_S)
    except KafkaException:
        return None


def _is_whole(view: ClusterMetadata | None) -> bool:
    if view is None or len(view.brokers) < NUM_NODES:
        return False
    partitions = [p for topic in view.topics.values() for p in topic.partitions.values()]
    return all(set(p.isrs) == set(p.replicas) for p in partitions)


@contextmanager
def running_cluster(image: str) -> Iterator[Cluster]:
    """A new cluster; everything of it is removed at the end.

    Raises:
        AssertionError: it does not come up; with the logs.
    """
    sweep()
    with ExitStack() as stack:
        network = stack.enter_context(make_network())
        ports = free_ports(NUM_NODES)
        cluster_id = new_cluster_id()
        nodes = [
            KafkaNode(image, network, node_id, ports, SETTINGS)
            .with_env("CLUSTER_ID", cluster_id)
            .with_env("KAFKA_HEAP_OPTS", "-Xmx256m -Xms64m")
            .with_env("KAFKA_OPTS", "-XX:TieredStopAtLevel=1")
            for node_id in range(1, NUM_NODES + 1)
        ]
        for node in nodes:
            stack.callback(node.stop)
            node.start()
        cluster = Cluster(nodes)
        try:
            wait_until(cluster.is_whole, READY_S, "three nodes see each other")
        except AssertionError as err:
            for node in nodes:
                err.add_note(f"{node.alias}:\n{node.log_tail()}")
            raise
        yield cluster
