"""Adapter of a server: the port between the engine's wishes and the routes of a kind of server.

An adapter holds no state and makes no decision: gate and labels are `server_client.py`'s, routing
is `engine.py`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.capacity import Gauges
from rlstreams.workers.engines.served.facts import ServerFacts
from rlstreams.workers.engines.served.http import ServerError, ServerHttp
from rlstreams.workers.engines.served.wire import Answer, AnswerError, GenerateRequest, gauges_of


class Adapter(ABC):
    """Client of one server of a kind. Each control call raises `ServerError` if it fails."""

    generate_route: ClassVar[str]
    alive: ClassVar[frozenset[int]]  # statuses of `/health` while a server works
    # In `/metrics`: running requests, waiting ones, the cache's used share, preemptions; "": none.
    gauge_names: ClassVar[tuple[str, str, str, str]]

    def __init__(self, http: ServerHttp, facts: ServerFacts, answer_s: float) -> None:
        """Args: answer_s: longest answer of a control route."""
        self.http = http
        self.facts = facts
        self._answer_s = answer_s

    @abstractmethod
    def body(self, request: GenerateRequest) -> dict[str, Any]:
        """The request as this server's JSON, every field set: defaults are the folder's."""

    @staticmethod
    @abstractmethod
    def answer(found: object) -> Answer:
        """The answer that this server's JSON holds.

        Raises:
            AnswerError: a field is missing or of another type.
        """

    @abstractmethod
    async def pause(self, mode: PauseMode, *, keep_cache: bool, deadline_s: float = 0.0) -> None:
        """Stop sampling; returns when nothing is sampled any more.

        Args:
            keep_cache: with KEEP, whether running requests go on with the keys and values that
                they have, or compute them again under the new weights.
            deadline_s: 0: as for every control call.
        """

    async def ask_engine(self, deadline_s: float) -> None:
        """Ask the engine behind the front end for an answer of its own; changes nothing."""
        await self.http.get(self.engine_route, deadline_s)

    async def gauges(self, deadline_s: float) -> Gauges:
        """The server's load, from its metrics.

        Raises:
            ServerError: it reports no load, or not under `gauge_names`.
        """
        found = await self.http.get("/metrics", deadline_s)
        try:
            return gauges_of(str(found), self.gauge_names)
        except AnswerError as err:
            raise ServerError(f"server {self.http.url}: /metrics: {err}") from err

    @property
    @abstractmethod
    def engine_route(self) -> str:
        """Route of the GET for `ask_engine`, among those that this version has."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on sampling."""

    @abstractmethod
    async def abort(self, request_id: str) -> bool:
        """End one request early; it is answered with its tokens so far. False: no route."""

    @abstractmethod
    async def set_label(self, label: str) -> None:
        """Set the server's name of its weights, if it keeps one; no request is touched."""

    @abstractmethod
    async def sleep(self, deadline_s: float) -> None:
        """Free the GPU's memory, weights and cache; nothing runs."""

    @abstractmethod
    async def wake(self, deadline_s: float) -> None:
        """Take the memory again; the weights are unknown until they are loaded."""

    @abstractmethod
    async def load_folder(self, folder: str, deadline_s: float) -> None:
        """Load a Hugging Face folder by the server's means; an error leaves unknown weights."""

    async def _post(self, path: str, body: Any, what: str, deadline_s: float = 0.0) -> Any:  # noqa: ANN401
        return await self.http.post(path, body, deadline_s or self._answer_s, what=what)
