"""Adapter of a server: the port between what we want of it and how its kind is asked.

An adapter holds no state and makes no decision: gate, routing and labels are `server.py`'s.
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
    """How one server is spoken to. Each control call raises `ServerError` if it fails."""

    generate_route: ClassVar[str]
    alive: ClassVar[frozenset[int]]  # what `/health` of one that works may be answered with
    # In `/metrics`: requests that run, that wait, the cache's share, preemptions; "": it has none.
    gauge_names: ClassVar[tuple[str, str, str, str]]

    def __init__(self, http: ServerHttp, facts: ServerFacts, answer_s: float) -> None:
        """Args: answer_s: longest answer of a control route."""
        self.http = http
        self.facts = facts
        self._answer_s = answer_s

    @abstractmethod
    def body(self, request: GenerateRequest) -> dict[str, Any]:
        """The request as this server's JSON; all is said: a default could be the folder's."""

    @staticmethod
    @abstractmethod
    def answer(found: object) -> Answer:
        """A whole answer.

        Raises:
            AnswerError: a field is missing or of another type.
        """

    @abstractmethod
    async def pause(self, mode: PauseMode, *, keep_cache: bool, deadline_s: float = 0.0) -> None:
        """Stop sampling; returns when nothing is sampled any more.

        Args:
            keep_cache: with KEEP, whether running requests go on with the keys and values that
                they have, or compute them again under the new weights.
            deadline_s: 0: that of every control call.
        """

    async def ask_engine(self, deadline_s: float) -> None:
        """Ask what only the engine behind the front end can answer; touches nothing."""
        await self.http.get(self.engine_route, deadline_s)

    async def gauges(self, deadline_s: float) -> Gauges:
        """What it says of its load, in Prometheus' words.

        Raises:
            ServerError: it says nothing of it, or not in these words.
        """
        found = await self.http.get("/metrics", deadline_s)
        try:
            return gauges_of(str(found), self.gauge_names)
        except AnswerError as err:
            raise ServerError(f"server {self.http.url}: /metrics: {err}") from err

    @property
    @abstractmethod
    def engine_route(self) -> str:
        """What to GET for it, of what this version has."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on sampling."""

    @abstractmethod
    async def abort(self, request_id: str) -> bool:
        """End one request early; it is answered with what it has. False: there is no way to."""

    @abstractmethod
    async def set_label(self, label: str) -> None:
        """Name the weights that it holds, where it keeps such a name; no request is touched."""

    @abstractmethod
    async def sleep(self, deadline_s: float) -> None:
        """Give up the GPU's memory, weights and cache; nothing runs."""

    @abstractmethod
    async def wake(self, deadline_s: float) -> None:
        """Have the memory again; what the weights are is unknown until they are loaded."""

    @abstractmethod
    async def load_folder(self, folder: str, deadline_s: float) -> None:
        """Load a Hugging Face folder by the server's own means; what it holds after an error is
        unknown."""

    async def _post(self, path: str, body: Any, what: str, deadline_s: float = 0.0) -> Any:  # noqa: ANN401
        return await self.http.post(path, body, deadline_s or self._answer_s, what=what)
