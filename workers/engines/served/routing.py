"""Which server a request goes to: our own choice, or that of a router in front of all servers.

Siblings of a group share a prompt, so they go to one server, whose prefix cache has it by then;
the group's choice is by highest random weight (rendezvous hashing: Thaler and Ravishankar, 1996),
so that a server which comes or goes moves only its own groups. Affinity ends where it would make
one server much busier than the least busy one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from rlstreams.workers.engines.served.http import ServerError, ServerHttp

if TYPE_CHECKING:
    from rlstreams.workers.engines.base import Held
    from rlstreams.workers.engines.served.facts import ServerFacts

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


class Router:
    """For generation alone, in front of all servers of one worker; belongs to its event loop.

    `vllm-router` or `sglang-router`: it picks the server, so all servers behind it count as one.
    New requests leave only while every one of them is up and holds the same version; which of them
    sampled is read from the version that the answer names. Whatever changes a server goes to each
    by its own address: a router would pass a `/pause` on to one of them.
    """

    def __init__(self, url: str) -> None:
        """Nothing is asked before the first request."""
        self.url = url
        self.http = ServerHttp(url)
        self.labels: dict[str, Held] = {}  # versions that any server behind it was given
        self.aborts: list[Callable[[str], Awaitable[bool]]] = []  # each server's own

    def check(self, facts: ServerFacts) -> None:
        """Whether a server can stand behind it.

        Raises:
            ServerError: its answers do not say which version sampled them.
        """
        if not facts.tells_versions:
            raise ServerError(
                f"{facts.name} behind router {self.url}: its answers do not name the version that "
                "sampled each token, and nobody here knows which server gave them; clear "
                "engine.routers, or use vLLM from 0.32 or SGLang from 0.5.23 on"
            )
