"""Adapter of a kind of server: the port between what we want of it and how it is asked.

An adapter holds no state and makes no decision: gate, routing and labels are `server.py`'s.
"""

from __future__ import annotations

from typing import Any, Protocol

from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.facts import Kind, ServerFacts
from rlstreams.workers.engines.served.http import ServerHttp
from rlstreams.workers.engines.served.wire import Answer, GenerateRequest


class Adapter(Protocol):
    """How one kind of server is spoken to."""

    @property
    def generate_route(self) -> str:
        """Where requests go."""

    @property
    def alive(self) -> frozenset[int]:
        """What `/health` of one that works may be answered with."""

    async def keeps_records(self, http: ServerHttp, deadline_s: float) -> bool:
        """Whether our plugin notes log-probs and versions of each request."""

    def body(self, request: GenerateRequest, facts: ServerFacts) -> dict[str, Any]:
        """The request as this server's JSON."""

    def answer(self, found: object) -> Answer:
        """A whole answer.

        Raises:
            AnswerError: a field is missing or of another type.
        """

    async def pause(
        self, http: ServerHttp, mode: PauseMode, *, keep_cache: bool, deadline_s: float
    ) -> None:
        """Stop sampling; returns when nothing is sampled any more.

        Args:
            keep_cache: with KEEP, whether running requests go on with the keys and values that
                they have, or compute them again under the new weights.
        """

    async def resume(self, http: ServerHttp, deadline_s: float) -> None:
        """Go on sampling."""

    async def abort(
        self, http: ServerHttp, facts: ServerFacts, request_id: str, deadline_s: float
    ) -> bool:
        """End one request early; it is answered with what it has. False: there is no way to."""

    async def set_label(
        self, http: ServerHttp, facts: ServerFacts, label: str, deadline_s: float
    ) -> None:
        """Name the weights that it holds, where it keeps such a name; no request is touched."""

    async def load_folder(
        self, http: ServerHttp, facts: ServerFacts, folder: str, deadline_s: float
    ) -> None:
        """Load a Hugging Face folder by the server's own means.

        Raises:
            ServerError: it could not; what it holds then is unknown.
        """


def adapter_of(kind: Kind) -> Adapter:
    """The adapter of `kind`."""
    if kind is Kind.VLLM:
        from rlstreams.workers.engines.served.vllm import VllmDialect

        return VllmDialect()
    from rlstreams.workers.engines.served.sglang import SglangDialect

    return SglangDialect()
