"""Ports of this machine that are free, for servers that must know theirs before they start."""

from __future__ import annotations

import secrets

from rlstreams.streams.broker.ports import is_free

# Below the ephemeral ranges: no client's connection takes one while its server is down.
_LOW, _HIGH = 20_000, 32_000


def free_ports(count: int) -> list[int]:
    """Different ones, at random."""
    found: set[int] = set()
    while len(found) < count:
        port = _LOW + secrets.randbelow(_HIGH - _LOW)
        if is_free(port):
            found.add(port)
    return sorted(found)
