"""A real broker whose clients meet it through the fault proxy, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlstreams.streams.broker.config import HOST
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.broker.ports import free_ports
from tests.faults.proxy import FaultProxy

END_TXN = 26  # API keys of the protocol (Kafka's protocol guide, "API keys")


@dataclass(frozen=True, slots=True)
class Proxied:
    """The proxy in front of a broker that runs."""

    proxy: FaultProxy

    @property
    def bootstrap(self) -> str:
        """Of clients that feel the weather."""
        return self.proxy.address


def is_request(api_key: int, chunk: bytes) -> bool:
    """Whether a chunk begins with a request of that kind: 4 bytes of length, 2 of API key."""
    return len(chunk) > 6 and int.from_bytes(chunk[4:6], "big") == api_key


@contextmanager
def proxied_broker(folder: Path) -> Iterator[Proxied]:
    """A broker that tells clients to come to the proxy; it reaches itself past it."""
    clients, internal, controller = free_ports(3)
    with FaultProxy(clients) as proxy:
        broker = EmbeddedBroker(
            folder,
            port=clients,
            settings={
                "listeners": f"PLAINTEXT://{HOST}:{clients},INTERNAL://{HOST}:{internal},"
                f"CONTROLLER://{HOST}:{controller}",
                "advertised.listeners": f"PLAINTEXT://{HOST}:{proxy.port},"
                f"INTERNAL://{HOST}:{internal}",
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,INTERNAL:PLAINTEXT,"
                "CONTROLLER:PLAINTEXT",
                "inter.broker.listener.name": "INTERNAL",
                "controller.quorum.voters": f"1@{HOST}:{controller}",
            },
        )
        broker.start()
        try:
            yield Proxied(proxy)
        finally:
            broker.stop()
