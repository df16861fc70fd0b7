"""Facts of a running server, found by asking it: the one module that knows server versions.

vLLM and SGLang both describe their routes in `/openapi.json`, so a feature that a version lacks
shows as a missing route: 0.25.1 has no `/weight_info`, 0.5.17 no `/begin_weight_update`. A version
older than all that were run is refused; any other is tried, and must have every route.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from rlstreams.workers.engines.served.http import ServerError, ServerGoneError, ServerHttp
from rlstreams.workers.weights.link.vllm_records import NAME_LABEL

INFO_ROUTE, OLD_INFO_ROUTE = "/server_info", "/get_server_info"  # of an SGLang
TESTED: Mapping[str, tuple[str, ...]] = {  # the first ran on GPUs, and is the one to install
    "vllm": ("0.25.1", "0.32.0"),
    "sglang": ("0.5.17",),
}
_LOOKED_AT = (
    "what a start and a run look at: its routes and ranks, the checksum of each version in it, "
    "and before each step whether its log-probs and the scorer's agree (guard)"
)


class RouterError(ServerError):
    """It is a router in front of servers; `cure` says what to name instead."""

    def __init__(self, url: str, servers: Sequence[str]) -> None:
        listed = ", ".join(servers) or "none yet"
        super().__init__(
            f"server {url} is a router (its /workers lists {listed}), which passes a pull on to "
            "one of its servers or to none: the others would sample with weights of no version"
        )
        named = ", ".join(f'"{server}"' for server in servers) or '"http://host:port", ...'
        self.cure = f"set engine.urls = [{named}]: a worker chooses among them itself"


class Kind(StrEnum):
    """Kind of a server."""

    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server's description of itself."""

    kind: Kind
    version: str
    model: str
    max_tokens: int  # longest sequence, prompt included
    routes: frozenset[str]
    settings: Mapping[str, Any]  # start arguments, as far as it names them
    keeps_records: bool = False  # our plugin records log-probs and versions of each request

    @property
    def name(self) -> str:
        """Name and version, as `vllm/0.32.0`."""
        return f"{self.kind}/{self.version}"

    @property
    def reports_versions(self) -> bool:
        """Whether an answer gives the version of each token, so that a request may go on while
        weights change; else each pull cuts all running requests."""
        mark = "/weight_info" if self.kind is Kind.VLLM else "/begin_weight_update"
        return self.keeps_records or mark in self.routes

    @property
    def has_session(self) -> bool:
        """Whether an update must lie between begin and end; SGLang only."""
        return "/begin_weight_update" in self.routes

    @property
    def abort_route(self) -> str:
        """Route by which a vLLM aborts one request; "": only hanging up does."""
        known = ("/abort_requests", "/inference/v1/abort_requests")
        return next((route for route in known if route in self.routes), "")


class Needed(NamedTuple):
    """Routes that a server must have."""

    name: str
    routes: tuple[str, ...]
    cost: str  # of their absence
    cure: str


NEEDED: Mapping[str, tuple[Needed, ...]] = {
    "vllm": (
        Needed(
            "development routes",
            ("/pause", "/resume", "/update_weights", "/collective_rpc"),
            "weights cannot change while it runs",
            "start it with VLLM_SERVER_DEV_MODE=1",
        ),
        Needed(
            "token route",
            ("/inference/v1/generate",),
            "token ids cannot go in and out",
            "start it with --enable-scale-out",
        ),
    ),
    "sglang": (
        Needed(
            "control routes",
            ("/pause_generation", "/continue_generation", "/update_weight_version"),
            "weights cannot change safely",
            "a newer SGLang",
        ),
    ),
}


def missing(facts: ServerFacts) -> list[tuple[Needed, str]]:
    """Route sets that a server lacks, each with a sentence on the missing routes."""
    lacking = [
        (needed, [route for route in needed.routes if route not in facts.routes])
        for needed in NEEDED[facts.kind]
    ]
    return [(one, f"no {', '.join(routes)}: {one.cost}") for one, routes in lacking if routes]


def to_install(kind: Kind) -> str:
    """Requirement for pip: the version that ran on GPUs."""
    return f"{kind}=={TESTED[kind][0]}"


def untested(kind: Kind, version: str) -> str:
    """Note on a version that was not run with rlstreams; "": it was."""
    if version.partition("+")[0] in TESTED[kind]:
        return ""
    return (
        f"not run with rlstreams ({', '.join(TESTED[kind])} were), and is tried; {_LOOKED_AT}. "
        f"Should one fail: install {to_install(kind)}"
    )


def too_old(kind: Kind, version: str) -> str:
    """Reason to refuse a version, unless `engine.allow_untested` is set; "": none."""
    oldest = min(TESTED[kind], key=_numbers)
    if not is_older(version, _numbers(oldest)):
        return ""
    return (
        f"older than {oldest}, the oldest that rlstreams was run with: install "
        f"{to_install(kind)}, or set engine.allow_untested = true to try it"
    )


def is_older(version: str, than: tuple[int, ...]) -> bool:
    """Whether a version is before `than`, as `0.25.1` before (0, 26); an unreadable one is not."""
    return bool(numbers := _numbers(version)) and numbers < than


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


async def ask_usable(
    http: ServerHttp, kind: Kind, deadline_s: float, *, allow_untested: bool
) -> ServerFacts:
    """Facts of the server at `http`, if a run with `rollout.engine = KIND` can use it.

    Raises:
        ServerError: as `ask_facts`, or it is a router, of another kind, too old, or of a version
            that was not run before and lacks a needed route.
    """
    await refuse_router(http, deadline_s)
    facts = await ask_facts(http, deadline_s)
    if facts.kind is not kind:
        raise ServerError(f"server {http.url} is {facts.name}, but rollout.engine is {kind}")
    if (why := too_old(kind, facts.version)) and not allow_untested:
        raise ServerError(f"server {http.url} is {facts.name}, {why}")
    if untested(kind, facts.version):
        for needed, lack in missing(facts):
            raise ServerError(
                f"server {http.url} is {facts.name}, which was not run with rlstreams, and has "
                f"{lack}; {needed.cure}, or install {to_install(kind)}"
            )
    return facts


async def refuse_router(http: ServerHttp, deadline_s: float) -> None:
    """Return if no router of vLLM or SGLang answers at `http`.

    vLLM's passes all that it does not know on to one server after the other, its description too:
    but for this route it looks as a server does.

    Raises:
        RouterError: one does.
        ServerGoneError: nothing answers.
    """
    try:
        found = await http.get("/workers", deadline_s)
    except ServerGoneError:
        raise
    except ServerError:
        return  # a server has no such route
    if isinstance(found, dict) and isinstance(listed := found.get("workers"), list):
        urls = (one.get("url") for one in listed if isinstance(one, dict))
        raise RouterError(http.url, sorted(str(url) for url in urls if url))


async def ask_facts(http: ServerHttp, deadline_s: float) -> ServerFacts:
    """Facts of the server at `http`.

    Raises:
        ServerGoneError: it does not answer.
        ServerError: it answers, but is of neither kind, or lacks a field.
    """
    described = await http.get("/openapi.json", deadline_s)
    routes = frozenset(described.get("paths", {})) if isinstance(described, dict) else frozenset()
    if "/generate" in routes:
        kind, path = Kind.SGLANG, INFO_ROUTE if INFO_ROUTE in routes else OLD_INFO_ROUTE
        found = await http.get(path, deadline_s)
    elif "/version" in routes and "/v1/models" in routes:
        kind, path = Kind.VLLM, "/version and /v1/models"
        found = await http.get("/version", deadline_s)
        models = await http.get("/v1/models", deadline_s)
    else:
        raise ServerError(
            f"server {http.url} is neither vLLM nor SGLang: its /openapi.json lists "
            f"{sorted(routes)[:5]}"
        )
    try:
        if kind is Kind.SGLANG:
            longest = int(found.get("max_req_input_len") or found["context_length"])
            model, settings, keeps_records = found["model_path"], found, False
        else:
            (served,) = models["data"]
            model, longest, settings = served["root"], int(served["max_model_len"]), {}
            keeps_records = await _keeps_records(http, deadline_s)
        return ServerFacts(
            kind=kind,
            version=str(found["version"]),
            model=str(model),
            max_tokens=longest,
            routes=routes,
            settings=settings,
            keeps_records=keeps_records,
        )
    except (KeyError, TypeError, ValueError) as err:
        raise ServerError(f"server {http.url}: {path} lacks a field: {err!r}") from err


def label_call(*label: str) -> dict[str, object]:
    """Body for `/collective_rpc`: names a vLLM's weights in our plugin's records."""
    return {"method": NAME_LABEL, "args": list(label)}


async def _keeps_records(http: ServerHttp, deadline_s: float) -> bool:
    """Whether our plugin is in the engine core: then that knows the method."""
    try:
        await http.post("/collective_rpc", label_call(), deadline_s, what="naming []")
    except ServerGoneError:
        raise
    except ServerError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Processes that hold a part of the model.

    Tensor and expert parallel ranks report the shard that they hold, and receive weights. The map
    between layouts cannot distinguish replicas in one server, nor stages of a pipeline.
    """

    total: int
    replicas: int = 1
    stages: int = 1  # for a vLLM only its plugin or its settings report it

    def refusal(self, kind: Kind) -> tuple[str, str]:
        """Reason that weights cannot reach all ranks, with its flag, and the cure; or ""."""
        if self.replicas > 1:
            flag = "--data-parallel-size" if kind is Kind.VLLM else "--dp-size"
            return (
                f"{flag} {self.replicas}: weights cannot reach replicas in one server",
                "set engine.servers to start as many instead, or name each in engine.urls",
            )
        if self.stages > 1:
            flag = "--pipeline-parallel-size" if kind is Kind.VLLM else "--pp-size"
            return (
                f"{flag} {self.stages}: weights cannot reach stages of a pipeline",
                "spread the model by --tensor-parallel-size (SGLang: --tp-size) instead",
            )
        return "", ""


async def ask_ranks(http: ServerHttp, facts: ServerFacts, deadline_s: float) -> Ranks:
    """Processes over which a server spreads its model.

    Raises:
        ServerError: it does not answer, or not with a number.
    """
    if facts.kind is Kind.SGLANG:
        tensor, stages, replicas = (
            int(facts.settings.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size")
        )
        return Ranks(total=tensor * stages * replicas, replicas=replicas, stages=stages)
    sizes = []
    for with_replicas in ("true", "false"):
        found = await http.get(f"/get_world_size?include_dp={with_replicas}", deadline_s)
        size = found.get("world_size") if isinstance(found, dict) else None
        if not isinstance(size, int) or size < 1:
            raise ServerError(f"server {http.url}: /get_world_size answers {found!r:.80}")
        sizes.append(size)
        if sizes == [1]:
            return Ranks(total=1)
    return Ranks(total=sizes[0], replicas=sizes[0] // sizes[1])
