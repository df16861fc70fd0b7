"""Adapter of a server: all that depends on its kind, from its start to the routes of a pull.

An adapter holds no state and makes no decision: gate and labels are `server_client.py`'s, routing
is `engine.py`'s.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.capacity import Gauges
from rlstreams.workers.engines.served.facts import Kind, Needed, Ranks, ServerFacts
from rlstreams.workers.engines.served.http import ServerError, ServerHttp
from rlstreams.workers.engines.served.wire import Answer, AnswerError, GenerateRequest, gauges_of

Value = str | int | float | bool
Calls = Sequence[tuple[str, Mapping[str, object]]]  # routes to call, in order, with their bodies


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """The start of a kind of server: names of its options, and those for what we need of it."""

    module: str  # that `python -m` runs
    distributions: tuple[str, ...]  # that have it: the usual one, those built for other devices
    model: str
    limit: str  # of requests at once
    log_level: str
    plugin: Mapping[str, str]  # the option that has it load our plugin
    sleeps: Mapping[str, Value]  # to give its memory up on demand
    reports_load: Mapping[str, Value] = field(default_factory=dict)  # none: it always does
    environment: Mapping[str, str] = field(default_factory=dict)
    control: Mapping[str, str] = field(default_factory=dict)  # environment, for control routes
    log_variable: str = ""  # variable of the library's own log level, in capitals

    @property
    def plugin_flag(self) -> str:
        """Option of the plugin, for a shell."""
        ((name, value),) = self.plugin.items()
        return f"--{name} {shlex.quote(value)}"


class Adapter(ABC):
    """Client of one server of a kind. Each control call raises `ServerError` if it fails."""

    kind: ClassVar[Kind]
    start: ClassVar[StartOptions]
    needed: ClassVar[tuple[Needed, ...]]
    spread_flags: ClassVar[tuple[str, str]]  # of replicas in one server, of a pipeline's stages
    has_staged_ranks: ClassVar[bool]  # its plugin counts the ranks of one stage
    greeting: ClassVar[tuple[str, Mapping[str, object]] | None]  # call that our plugin alone takes
    cures: ClassVar[tuple[str, str]]  # for ranks that it does not report, versions likewise
    generate_route: ClassVar[str]
    alive: ClassVar[frozenset[int]]  # statuses of `/health` while a server works
    # In `/metrics`: running requests, waiting ones, the cache's used share, preemptions; "": none.
    gauge_names: ClassVar[tuple[str, str, str, str]]

    def __init__(self, http: ServerHttp, facts: ServerFacts, answer_s: float) -> None:
        """Args: answer_s: longest answer of a control route."""
        self.http = http
        self.facts = facts
        self._answer_s = answer_s

    @staticmethod
    @abstractmethod
    def is_behind(routes: frozenset[str]) -> bool:
        """Whether a server with these routes is of this kind."""

    @classmethod
    @abstractmethod
    async def describe(
        cls, http: ServerHttp, routes: frozenset[str], deadline_s: float
    ) -> ServerFacts:
        """Facts of the server at `http`.

        Raises:
            ServerGoneError: it does not answer.
            ServerError: a field is missing.
        """

    @staticmethod
    @abstractmethod
    def answer_args(version: str) -> dict[str, Value]:
        """Start options by which its answers have token ids, and log-probs of what was drawn."""

    @abstractmethod
    async def ranks(self, deadline_s: float, *, with_stages: bool = False) -> Ranks:
        """Processes over which the server spreads its model.

        Args:
            with_stages: ask for stages of a pipeline, too, where that is a call of its own.

        Raises:
            ServerError: it does not answer, or not with a number.
            LookupError, TypeError, ValueError: its answer about stages lacks a field.
        """

    @classmethod
    def refusal(cls, ranks: Ranks) -> tuple[str, str]:
        """Reason that weights cannot reach all ranks, with its flag, and the cure; or ""."""
        of_replicas, of_stages = cls.spread_flags
        if ranks.replicas > 1:
            return (
                f"{of_replicas} {ranks.replicas}: weights cannot reach replicas in one server",
                "set engine.servers to start as many instead, or name each in engine.urls",
            )
        if ranks.stages > 1:
            return (
                f"{of_stages} {ranks.stages}: weights cannot reach stages of a pipeline",
                "spread the model by --tensor-parallel-size (SGLang: --tp-size) instead",
            )
        return "", ""

    @abstractmethod
    async def plugin(self, deadline_s: float) -> str:
        """Our plugin, for people, as far as the server itself shows it; "": not there."""

    @abstractmethod
    def has_token_ids(self) -> bool | None:
        """Whether its answers have token ids; None: its route has nothing else."""

    @abstractmethod
    def update_calls(self, order: str, num_ranks: int) -> Calls:
        """Calls that hand an order to our plugin."""

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
