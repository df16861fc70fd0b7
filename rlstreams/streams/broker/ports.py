"""Ports that a broker or a model server can have again after it was down."""

from __future__ import annotations

import secrets
import socket
import struct

from rlstreams.streams.broker.config import HOST
from rlstreams.streams.log.errors import StreamsError

# Below the ephemeral ranges of Linux and macOS: while its owner is down, or has not started yet, no
# client's outgoing connection can take the port.
_PORTS = (20_000, 32_000)


def is_free(port: int, host: str = HOST) -> bool:
    """Whether a process could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def answers(port: int, host: str = HOST) -> bool:
    """Whether a Kafka broker there answers a request for its API versions.

    A connection alone is no proof: the kernel still takes one for a broker that is being killed.
    """
    request = struct.pack(">hhih", 18, 0, 0, -1)  # ApiVersions 0, correlation 0, no client id
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            return bool(connection.recv(1))
    except OSError:
        return False


def free_port(*other_than: int, host: str = HOST) -> int:
    """A port that is free now.

    Raises:
        StreamsError: none of a thousand was.
    """
    low, high = _PORTS
    for _ in range(1000):
        port = low + secrets.randbelow(high - low)
        if port not in other_than and is_free(port, host):
            return port
    raise StreamsError(f"no free port between {low} and {high} on {host}")


def free_ports(number: int, host: str = HOST) -> list[int]:
    """So many of them, each another; raises as `free_port`."""
    found: list[int] = []
    while len(found) < number:
        found.append(free_port(*found, host=host))
    return found
