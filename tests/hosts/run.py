"""The demo on four hosts and a broker's, its roles started as production does, none by `up`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import docker
from confluent_kafka.admin import AdminClient

from rlstreams.streams.broker.config import new_cluster_id
from rlstreams.streams.broker.ports import free_ports
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.errors import BrokerError
from tests.cluster.cluster import SETTINGS
from tests.containers import ROOT, KafkaNode, Steps, make_network, sweep, wait_until
from tests.hosts.host import Host, roles

DEMO = ROOT / "infra/examples"
OURS = ROOT / "infra/hosts"
RUN = "demo"
READY_S = 300.0  # a Java start, and on a busy machine four of torch
PROGRESS_S = 300.0
GIVEN_UP_S = 60.0
ANSWER_S = 10.0
# As the embedded broker: one node, one replica of its own topics.
_OWN_TOPICS = (
    "offsets.topic.replication.factor",
    "transaction.state.log.replication.factor",
    "transaction.state.log.min.isr",
    "share.coordinator.state.topic.replication.factor",
    "share.coordinator.state.topic.min.isr",
)
# Who is where. `desk` is an operator's: it has the configuration and nothing else.
ROLES: Mapping[str, tuple[str, ...]] = {
    "learner": ("prompts", "trainer"),
    "sampler": ("rollout --ordinal 0",),
    "mixed": ("rollout --ordinal 1", "logprob"),
    "desk": (),
}
# As few as there may be, where a test has little time.
FEW: Mapping[str, tuple[str, ...]] = {
    "learner": ("prompts", "trainer"),
    "sampler": ("rollout",),
    "scorer": ("logprob",),
    "desk": (),
}


class HostsRun:
    """Started by `running`; its hosts by name."""

    def __init__(
        self,
        bus: KafkaBus,
        node: KafkaNode,
        hosts: Mapping[str, Host],
        placed: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._placed = placed
        self.bus = bus
        self.node = node
        self.hosts = hosts
        self._steps = Steps(bus)

    def start(self) -> None:
        """The topics, from the desk; then every role on its host."""
        self.hosts["desk"].start()
        done = self.ask("broker", "topics")
        assert done[0] == 0, done[1]
        for host in self.hosts.values():
            host.start()

    def ask(self, *words: str) -> tuple[int, str]:
        """`rlstreams` at the desk, with the run's configuration; its status and what it said."""
        found = self.hosts["desk"].run("rlstreams", *words, "demo.toml", "hosts.toml")
        return found.exit_code, found.output.decode("utf-8", "replace")

    @property
    def step(self) -> int:
        """The newest that was seen."""
        return self._steps.newest

    def goes_on(self, num_steps: int = 2) -> float:
        """Wait for new steps in the log; how long that took, seconds.

        Raises:
            AssertionError: they do not come; with what the roles wrote.
        """
        begun = time.monotonic()
        target = self._steps.look() + num_steps
        try:
            wait_until(lambda: self._steps.look() >= target, PROGRESS_S, f"step {target}")
        except AssertionError as err:
            err.add_note(self.logs())
            raise
        return time.monotonic() - begun

    def cut_off(self, name: str, at_least_s: float = 0.0) -> None:
        """A host is off the network until the broker has given its workers up, and then back.

        Args:
            at_least_s: and for as long.
        """
        groups = [f"{RUN}.{g}" for g in ("rollout", "logprob") if g in " ".join(self._placed[name])]
        host, begun = self.hosts[name], time.monotonic()
        before = self._members(groups)
        host.cut_off()
        wait_until(
            lambda: (
                time.monotonic() - begun >= at_least_s
                and (not groups or self._members(groups) < before)
            ),
            GIVEN_UP_S + at_least_s,
            f"the broker gives up the workers of {name}",
        )
        host.join_again()

    def _members(self, groups: Sequence[str]) -> int:
        if not groups:
            return 0
        admin = AdminClient({"bootstrap.servers": self.node.address, "log_level": "2"})
        found = admin.describe_consumer_groups(list(groups))
        return sum(len(each.result(ANSWER_S).members) for each in found.values())

    def resume(self, steps: int) -> None:
        """Drain every host, and start it again with another target: the operator's `--resume`."""
        working = [name for name in self.hosts if self._placed[name]]
        for name in working:
            self.hosts[name].container.kill("SIGTERM")
        self._ends(working)
        for host in self.hosts.values():
            host.put({"hosts.toml": configuration(steps, self._placed)})
        for name in working:
            self.hosts[name].start()

    def completes(self) -> None:
        """Wait until the roles of the trainer's host have ended by themselves: all steps are made,
        and the last evaluation is issued. Then the other hosts are told to drain."""
        self._ends(["learner"])
        others = [name for name in self.hosts if self._placed[name] and name != "learner"]
        for name in others:
            self.hosts[name].container.kill("SIGTERM")
        self._ends(others)

    def ends(self) -> None:
        """Wait until every role of every host has ended by itself."""
        self._ends([name for name in self.hosts if self._placed[name]])

    def _ends(self, names: Sequence[str]) -> None:
        what = f"all roles end on {', '.join(names)}"
        try:
            wait_until(
                lambda: not any(self.hosts[name].is_running for name in names), PROGRESS_S, what
            )
        except AssertionError as err:
            err.add_note(self.logs())
            raise

    def logs(self, num_lines: int = 25) -> str:
        """The end of what each host wrote."""
        return "\n".join(f"== {name}\n{h.log(num_lines)}" for name, h in self.hosts.items())

    def close(self) -> None:
        """Release the reader."""
        self._steps.close()


@contextmanager
def running(
    image: str,
    steps: int,
    *,
    placed: Mapping[str, tuple[str, ...]] = ROLES,
    extra: Mapping[str, Mapping[str, Path | bytes]] | None = None,
    environment: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[HostsRun]:
    """A broker and the hosts, made and not started; everything is removed at the end.

    Args:
        image: of Kafka.
        steps: of the run.
        extra: more files of a host, by its name; they win.
        environment: more of a host's environment, by its name.
    """
    sweep()
    client = docker.from_env()
    with ExitStack() as stack:
        stack.callback(client.close)
        network = stack.enter_context(make_network())
        (port,) = free_ports(1)
        node = (
            KafkaNode(image, network, 1, [port], {**SETTINGS, **dict.fromkeys(_OWN_TOPICS, "1")})
            .with_env("CLUSTER_ID", new_cluster_id())
            .with_env("KAFKA_HEAP_OPTS", "-Xmx256m -Xms64m")
            .with_env("KAFKA_OPTS", "-XX:TieredStopAtLevel=1")
        )
        stack.callback(node.stop)
        node.start()
        secret = secrets.token_hex(16)
        hosts: dict[str, Host] = {}
        for name, of_host in placed.items():
            hosts[name] = Host(
                client,
                client.networks.get(network.id),
                name,
                roles(of_host) if of_host else "exec sleep infinity",
                _files(steps, of_host, placed) | dict((extra or {}).get(name, {})),
                ({"RLSTREAMS_WEIGHTS_SECRET": secret} if of_host else {})
                | dict((environment or {}).get(name, {})),
            )
            stack.callback(hosts[name].remove)
        bus = stack.enter_context(KafkaBus(node.address, RUN))
        run = HostsRun(bus, node, hosts, placed)
        stack.callback(run.close)
        wait_until(lambda: _answers(bus), READY_S, "the broker answers")
        run.start()
        yield run


def _answers(bus: KafkaBus) -> bool:
    try:
        return bool(bus.cluster_id())
    except BrokerError:
        return False


def configuration(steps: int, placed: Mapping[str, tuple[str, ...]] = ROLES) -> bytes:
    """What lies on every host as `hosts.toml`."""
    ours = (OURS / "hosts.toml").read_text("utf-8")
    num = sum(role.startswith("rollout") for of_host in placed.values() for role in of_host)
    ours = ours.replace("workers = 2", f"workers = {num}")
    return f"{ours}\n[trainer]\nsteps = {steps}\n[prompts]\nevaluate_rows = 32\n".encode()


def _files(
    steps: int, of_host: tuple[str, ...], placed: Mapping[str, tuple[str, ...]]
) -> dict[str, Path | bytes]:
    """What a host needs, and no more: its copies, as an operator would lay them there."""
    files: dict[str, Path | bytes] = {
        "demo.toml": DEMO / "demo.toml",
        "hosts.toml": configuration(steps, placed),
        "keep.sh": OURS / "keep.sh",
    }
    if of_host:
        files["demo/model"] = DEMO / "demo/model"
    if "prompts" in of_host or "trainer" in of_host:
        files["demo/train.jsonl"] = DEMO / "demo/train.jsonl"
        files["demo/held_out.jsonl"] = DEMO / "demo/held_out.jsonl"
    return files
