"""Facts of a running server, found by asking it: the one place where versions differ.

vLLM and SGLang both describe their routes in `/openapi.json`, so what a version lacks shows as a
route that is not there: 0.25.1 has no `/weight_info`, 0.5.17 no `/begin_weight_update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlstreams.workers.engines.served.http import ServerError, ServerHttp

TESTED: Mapping[str, tuple[str, ...]] = {
    "vllm": ("0.25.1", "0.32.0"),
    "sglang": ("0.5.17",),
}


class Kind(StrEnum):
    """Which server it is."""

    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server's own words."""

    kind: Kind
    version: str
    model: str
    max_tokens: int  # longest sequence, prompt included
    routes: frozenset[str]
    settings: Mapping[str, Any]  # start arguments, as far as it tells them
    keeps_records: bool = False  # our plugin notes log-probs and versions of each request

    @property
    def name(self) -> str:
        """`vllm/0.32.0`."""
        return f"{self.kind}/{self.version}"

    @property
    def is_tested(self) -> bool:
        """Whether this version was run with these adapters."""
        return not untested(self.kind, self.version)

    @property
    def reports_spans(self) -> bool:
        """Whether an answer says which token came from which version."""
        mark = "/weight_info" if self.kind is Kind.VLLM else "/begin_weight_update"
        return mark in self.routes

    @property
    def tells_versions(self) -> bool:
        """Whether a request may go on while weights change; else each pull cuts all that run."""
        return self.reports_spans or self.keeps_records

    @property
    def has_session(self) -> bool:
        """SGLang only: an update must lie between begin and end."""
        return "/begin_weight_update" in self.routes

    @property
    def abort_route(self) -> str:
        """Where one request is aborted; empty if only by hanging up."""
        known = ("/abort_requests", "/inference/v1/abort_requests", "/abort_request")
        return next((route for route in known if route in self.routes), "")


def untested(kind: Kind, version: str) -> str:
    """Why a version is refused, unless `engine.allow_untested` is set; "": it was run here."""
    if version.partition("+")[0] in TESTED[kind]:
        return ""
    return (
        f"which rlstreams was not run with (only with {', '.join(TESTED[kind])}): "
        "set engine.allow_untested = true to use it"
    )


async def ask_usable(
    http: ServerHttp, kind: Kind, deadline_s: float, *, allow_untested: bool
) -> ServerFacts:
    """What the server at `http` is, if a run with `rollout.engine = KIND` can use it.

    Raises:
        ServerGoneError: it does not answer.
        ServerError: it is of another kind or version, or lacks a field.
    """
    facts = await ask_facts(http, deadline_s)
    if facts.kind is not kind:
        raise ServerError(f"server {http.url} is {facts.name}, but rollout.engine is {kind}")
    if (why := untested(kind, facts.version)) and not allow_untested:
        raise ServerError(f"server {http.url} is {facts.name}, {why}")
    return facts


async def ask_facts(http: ServerHttp, deadline_s: float) -> ServerFacts:
    """What the server at `http` is.

    Raises:
        ServerGoneError: it does not answer.
        ServerError: it answers, but is neither kind, or lacks a field.
    """
    described = await http.get("/openapi.json", deadline_s)
    routes = frozenset(described.get("paths", {})) if isinstance(described, dict) else frozenset()
    if "/generate" in routes:
        return await _sglang(http, routes, deadline_s)
    if "/version" in routes and "/v1/models" in routes:
        return await _vllm(http, routes, deadline_s)
    raise ServerError(
        f"server {http.url} is neither vLLM nor SGLang: its /openapi.json lists "
        f"{sorted(routes)[:5]}"
    )


async def _vllm(http: ServerHttp, routes: frozenset[str], deadline_s: float) -> ServerFacts:
    version = await http.get("/version", deadline_s)
    models = await http.get("/v1/models", deadline_s)
    try:
        (model,) = models["data"]
        return ServerFacts(
            kind=Kind.VLLM,
            version=str(version["version"]),
            model=str(model["root"]),
            max_tokens=int(model["max_model_len"]),
            routes=routes,
            settings={},
        )
    except (KeyError, TypeError, ValueError) as err:
        raise ServerError(
            f"server {http.url}: /version and /v1/models lack a field: {err!r}"
        ) from err


async def _sglang(http: ServerHttp, routes: frozenset[str], deadline_s: float) -> ServerFacts:
    """Older versions call the route `/get_server_info`."""
    path = "/server_info" if "/server_info" in routes else "/get_server_info"
    found = await http.get(path, deadline_s)
    try:
        return ServerFacts(
            kind=Kind.SGLANG,
            version=str(found["version"]),
            model=str(found["model_path"]),
            max_tokens=int(found.get("max_req_input_len") or found["context_length"]),
            routes=routes,
            settings=found,
        )
    except (KeyError, TypeError, ValueError) as err:
        raise ServerError(f"server {http.url}: {path} lacks a field: {err!r}") from err
