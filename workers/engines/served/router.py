"""A router for generation alone, in front of all servers of one worker.

`vllm-router` or `sglang-router`: it picks the server, so all servers behind it count as one. New
requests leave only while every one of them is up and holds the same version; which of them sampled
is read from the version that the answer names. Whatever changes a server goes to each by its own
address: a router would pass a `/pause` on to one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstreams.workers.engines.served.http import ServerError, ServerHttp

if TYPE_CHECKING:
    from rlstreams.workers.engines.served.answer import Held
    from rlstreams.workers.engines.served.facts import ServerFacts


class Router:
    """Shared by the servers behind it; belongs to the engine's event loop."""

    def __init__(self, url: str) -> None:
        """Nothing is asked before the first request."""
        self.url = url
        self.http = ServerHttp(url)
        self.labels: dict[str, Held] = {}  # versions that any server behind it was given
        self.servers: list[ServerHttp] = []  # each by its own address

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
