"""Kafka nodes in containers, the runs on them, and the end of what a killed test left.

The image is `KAFKA_IMAGE`, else the public one of our version; where that cannot be pulled,
`infra/kafka` builds the same broker. The container that testcontainers would start to clean up
after us is such an image too, so it stays off and we clean up ourselves.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import docker
from docker.errors import DockerException, ImageNotFound, NotFound
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.broker.config import HOST
from rlstreams.streams.broker.jars import KAFKA_VERSION
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.kafka.reader import KafkaReader
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.topics import STEPS

ROOT = Path(__file__).parents[1]
PUBLIC_IMAGE = f"apache/kafka:{KAFKA_VERSION}"
OWNER = "rlstreams.tests.owner"  # label: process id of the test run
BUILD_S = 420.0
STOP_S = 15.0

testcontainers_config.ryuk_disabled = True


class UnavailableError(RuntimeError):
    """No Docker, or no image for it; says which and what was tried."""


def kafka_image() -> str:
    """Name of an image of Kafka that is here.

    Raises:
        UnavailableError: Docker does not answer, or the image is neither here nor to be had.
    """
    named = os.environ.get("KAFKA_IMAGE", "")
    problem = _fetch(named or PUBLIC_IMAGE)
    if not problem:
        return named or PUBLIC_IMAGE
    if named:
        raise UnavailableError(f"KAFKA_IMAGE: {problem}")
    built = subprocess.run(
        [sys.executable, "-m", "infra.kafka.image"], cwd=ROOT, capture_output=True,
        text=True, timeout=BUILD_S, check=False,
    )  # fmt: skip
    if built.returncode:
        raise UnavailableError(f"{problem}; and {built.stderr.strip()}")
    return built.stdout.strip()


def _fetch(name: str) -> str:
    """Have the image here; empty if it is, else why not."""
    if problem := _silence():
        raise UnavailableError(f"no Docker answers: {problem}")
    client = docker.from_env(timeout=60)
    try:
        client.images.get(name)
    except ImageNotFound:
        try:
            client.images.pull(name)
        except (DockerException, OSError) as err:
            return f"{name} cannot be pulled: {err}"
    finally:
        client.close()
    return ""


def _silence() -> str:
    """Why Docker does not answer; empty if it does."""
    # Where nobody listens, its client forgets to close the socket that it tried.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            docker.from_env(timeout=60).close()
        except DockerException as err:
            problem = str(err)
        else:
            problem = ""
        gc.collect()
    return problem


def sweep() -> None:
    """Remove containers and networks of test runs that do not live any more."""
    client = docker.from_env()
    for container in client.containers.list(all=True, filters={"label": OWNER}):
        if _is_dead(container.labels[OWNER]):
            container.remove(force=True, v=True)
    for network in client.networks.list(filters={"label": OWNER}):
        if _is_dead(network.attrs["Labels"][OWNER]):
            network.remove()
    client.close()


def _is_dead(owner: str) -> bool:
    return not Path(f"/proc/{owner}").exists()


def make_network() -> Network:
    """A network of our own, not yet created."""
    return Network(docker_network_kw={"labels": {OWNER: str(os.getpid())}})


class KafkaNode(DockerContainer):
    """One node of a KRaft cluster, broker and controller in one.

    Clients on this machine reach it at `address`, which stays the same when the node starts again;
    the nodes reach each other by their names on the network.
    """

    def __init__(
        self,
        image: str,
        network: Network,
        node_id: int,
        ports: Sequence[int],
        settings: Mapping[str, str],
    ) -> None:
        """Describe it.

        Args:
            image: what to run.
            network: shared by all nodes.
            node_id: from 1.
            ports: of all nodes on this machine, by node.
            settings: server properties, the same for all nodes.
        """
        self.alias = f"kafka-{node_id}"
        self.address = f"{HOST}:{ports[node_id - 1]}"
        super().__init__(
            image,
            network=network,
            network_aliases=[self.alias],
            labels={OWNER: str(os.getpid())},
            hostname=self.alias,
        )
        self.ports = {"9092": (HOST, ports[node_id - 1])}
        voters = ",".join(f"{n}@kafka-{n}:9093" for n in range(1, len(ports) + 1))
        own = {
            "node.id": str(node_id),
            "listeners": "PLAINTEXT://:9092,CONTROLLER://:9093,INTERNAL://:9094",
            "advertised.listeners": f"PLAINTEXT://{self.address},INTERNAL://{self.alias}:9094",
            "controller.quorum.voters": voters,
        }
        for name, value in {**settings, **own}.items():
            self.with_env(f"KAFKA_{name.upper().replace('.', '_')}", value)

    def kill(self) -> None:
        """SIGKILL; its files stay."""
        self.get_wrapped_container().kill()

    def stop_cleanly(self) -> None:
        """SIGTERM: it hands its partitions over first."""
        self.get_wrapped_container().stop(timeout=int(STOP_S))

    def start_again(self) -> None:
        """The same files, the same address."""
        self.get_wrapped_container().start()

    def cut_off(self) -> None:
        """Nobody reaches it and it reaches nobody, yet it lives."""
        self._net().disconnect(self.get_wrapped_container())

    def join_again(self) -> None:
        """Back on the network, under its name and its port."""
        self._net().connect(self.get_wrapped_container(), aliases=[self.alias])

    def _net(self) -> docker.models.networks.Network:
        return self.get_docker_client().client.networks.get(self._network.id)

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines that it wrote."""
        return self.get_wrapped_container().logs(tail=num_lines).decode("utf-8", "replace")

    def stop(self, force: bool = True, delete_volume: bool = True) -> None:
        """Remove it, also where it never started."""
        try:
            super().stop(force, delete_volume)
        except NotFound:
            return


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until `condition()` holds.

    Raises:
        AssertionError: not within `timeout_s`; names `what`.
    """
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < timeout_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)
    return time.monotonic() - begun


class Steps:
    """The newest step in the log of a run; its topics must be there once it is asked."""

    def __init__(self, bus: KafkaBus) -> None:
        self.newest = 0
        self._bus = bus
        self._reader: KafkaReader | None = None

    def look(self) -> int:
        """It, as of now."""
        if self._reader is None:
            self._reader = self._bus.reader(self._bus.beginnings(STEPS.name))
        for raw in self._reader.poll(100, 0.0):
            event = decoded(raw).event
            if isinstance(event, StepCompleted):
                self.newest = max(self.newest, event.step)
        return self.newest

    def close(self) -> None:
        """Release the reader."""
        if self._reader is not None:
            self._reader.close()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and worst, seconds."""
    return {"median": round(statistics.median(values), 1), "worst": round(max(values), 1)}


def write_record(kind: str, image: str, begun_s: float, found: Mapping[str, object]) -> None:
    """Write what a script that breaks things found to tests/bench/results/KIND-DATE.json.

    Args:
        begun_s: of the script, on the monotonic clock.
    """
    now = datetime.now(UTC)
    record = {
        "machine": {"cores": os.cpu_count(), "system": platform.platform()},
        "image": image,
        "recorded_at": now.isoformat(timespec="seconds"),
        "took_s": round(time.monotonic() - begun_s),
        **found,
    }
    path = ROOT / f"tests/bench/results/{kind}-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    print(f"{path.relative_to(ROOT)}: ok {found['ok']}, {found['steps']} steps")  # noqa: T201


def main() -> int:
    """Have the image here, and print its name; 1 with the reason where it is not to be had."""
    try:
        print(kafka_image())  # noqa: T201
    except UnavailableError as err:
        print(err, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
