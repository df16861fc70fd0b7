"""Which server a request goes to.

Siblings of a group share a prompt, so they go to one server, whose prefix cache has it by then;
the group's choice is by highest random weight (rendezvous hashing: Thaler and Ravishankar, 1996),
so that a server which comes or goes moves only its own groups. Affinity ends where it would make
one server much busier than the least busy one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

SLACK = 8  # requests that the preferred server may have more than the least busy one


def choose(group_id: str, in_flight: Mapping[str, int], limit: int) -> str | None:
    """The url of the server to take, or None if all are full.

    Args:
        in_flight: requests of each server that may take one, by url.
        limit: most requests that a server is given at once.
    """
    least = min(in_flight.values(), default=limit)
    near = [url for url, number in in_flight.items() if number < limit and number <= least + SLACK]
    return max(near, key=lambda url: _weight(group_id, url), default=None)


def _weight(group_id: str, url: str) -> bytes:
    return hashlib.blake2b(f"{group_id}\0{url}".encode(), digest_size=8).digest()
