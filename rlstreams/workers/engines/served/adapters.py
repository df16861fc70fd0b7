"""The adapter of each kind of server, and the question which of them a server needs."""

from __future__ import annotations

from collections.abc import Mapping

from rlstreams.workers.engines.served.adapter import Adapter
from rlstreams.workers.engines.served.facts import (
    Kind,
    Needed,
    ServerFacts,
    refuse_router,
    to_install,
    too_old,
    untested,
)
from rlstreams.workers.engines.served.http import ServerError, ServerHttp
from rlstreams.workers.engines.served.sglang import SglangAdapter
from rlstreams.workers.engines.served.vllm import VllmAdapter

ADAPTERS: Mapping[Kind, type[Adapter]] = {own.kind: own for own in (VllmAdapter, SglangAdapter)}


def missing(facts: ServerFacts) -> list[tuple[Needed, str]]:
    """Route sets that a server lacks, each with a sentence on the missing routes."""
    lacking = [
        (needed, [route for route in needed.routes if route not in facts.routes])
        for needed in ADAPTERS[facts.kind].needed
    ]
    return [(one, f"no {', '.join(routes)}: {one.cost}") for one, routes in lacking if routes]


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


async def ask_facts(http: ServerHttp, deadline_s: float) -> ServerFacts:
    """Facts of the server at `http`.

    Raises:
        ServerGoneError: it does not answer.
        ServerError: it answers, but is of no kind here, or lacks a field.
    """
    described = await http.get("/openapi.json", deadline_s)
    routes = frozenset(described.get("paths", {})) if isinstance(described, dict) else frozenset()
    for adapter in ADAPTERS.values():
        if adapter.is_behind(routes):
            return await adapter.describe(http, routes, deadline_s)
    raise ServerError(
        f"server {http.url} is none of {', '.join(ADAPTERS)}: its /openapi.json lists "
        f"{sorted(routes)[:5]}"
    )
