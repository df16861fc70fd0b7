"""Which server a request goes to. Pure.

Siblings of a group share a prompt, so they go to one server, whose prefix cache has it by then;
the group's choice is by highest random weight (rendezvous hashing: Thaler and Ravishankar, 1996),
so that a server which comes or goes moves only its own groups. Affinity ends where it would make
one server much busier than the least busy one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

SLACK = 8  # requests that the preferred server may have more than the least busy one


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One server that may take a request now."""

    url: str
    in_flight: int
    limit: int  # most requests that it is given at once


def choose(group_id: str, places: Sequence[Place]) -> str | None:
    """The url of the server to take, or None if all are full."""
    free = [place for place in places if place.in_flight < place.limit]
    if not free:
        return None
    least = min(place.in_flight for place in free)
    near = [place for place in free if place.in_flight <= least + SLACK]
    return max(near, key=lambda place: _weight(group_id, place.url)).url


def _weight(group_id: str, url: str) -> bytes:
    return hashlib.blake2b(f"{group_id}\0{url}".encode(), digest_size=8).digest()
