"""Check of a running server: what it lacks for use by rlstreams, with cost and cure.

Asks the server itself, and changes nothing: two requests of one token.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from rlstreams.streams.addresses import is_loopback
from rlstreams.workers.engines.served.adapter import Adapter
from rlstreams.workers.engines.served.adapters import ADAPTERS, ask_facts, missing
from rlstreams.workers.engines.served.facts import (
    RouterError,
    ServerFacts,
    refuse_router,
    too_old,
    untested,
)
from rlstreams.workers.engines.served.http import ServerError, ServerHttp
from rlstreams.workers.engines.served.wire import AnswerError, GenerateRequest

ASK_S = 60.0  # the first request of a fresh server compiles
_PROBE_S = 0.5
_CERTAIN = -0.01  # nats; a token's log-prob above it
START = "start it, with what `rlstreams config server vllm|sglang CONFIG` prints"


class Weight(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    SLOW = "slow"  # works, at a price
    BROKEN = "broken"  # cannot be used


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check."""

    name: str
    weight: Weight
    found: str
    cure: str = ""


async def check_server(url: str) -> tuple[CheckResult, ...]:
    """Every check of the server at `url`."""
    http = ServerHttp(url)
    try:
        try:
            await refuse_router(http, ASK_S)
            facts = await ask_facts(http, ASK_S)
        except RouterError as err:
            return (CheckResult("server", Weight.BROKEN, str(err), err.cure),)
        except ServerError as err:
            return (CheckResult("server", Weight.BROKEN, str(err), START),)
        adapter = ADAPTERS[facts.kind](http, facts, ASK_S)
        return (
            _version(facts),
            *_routes(adapter),
            _spans(adapter),
            await _plugin(adapter),
            *await _spread(adapter),
            await _answers(adapter),
            _exposed(url),
        )
    finally:
        await http.close()


def is_usable(findings: Sequence[CheckResult]) -> bool:
    """Whether nothing is broken."""
    return all(finding.weight is not Weight.BROKEN for finding in findings)


def _version(facts: ServerFacts) -> CheckResult:
    found = f"{facts.name}, model {facts.model}, at most {facts.max_tokens} tokens"
    if why := too_old(facts.kind, facts.version):
        return CheckResult("version", Weight.BROKEN, f"{found}; {why}")
    why = untested(facts.kind, facts.version)
    return CheckResult("version", Weight.OK, f"{found}; {why}" if why else found)


def _routes(adapter: Adapter) -> Iterator[CheckResult]:
    lacking = {needed.name: lack for needed, lack in missing(adapter.facts)}
    for needed in adapter.needed:
        if lack := lacking.get(needed.name):
            yield CheckResult(needed.name, Weight.BROKEN, lack, needed.cure)
        else:
            yield CheckResult(needed.name, Weight.OK, ", ".join(needed.routes))
    if (has_token_ids := adapter.has_token_ids()) is None:
        return
    if has_token_ids:
        yield CheckResult("token ids", Weight.OK, "no tokenizer in the way")
    else:
        found = "it has a tokenizer: answers are text, without token ids"
        yield CheckResult("token ids", Weight.BROKEN, found, "start it with --skip-tokenizer-init")


def _spans(adapter: Adapter) -> CheckResult:
    facts = adapter.facts
    if facts.reports_versions:
        by = "our plugin's records" if facts.keeps_records else "the server"
        return CheckResult("version spans", Weight.OK, f"reported by {by}, per token")
    return CheckResult(
        "version spans",
        Weight.SLOW,
        "none: each pull ends the running requests, which are resumed with their tokens so far",
        adapter.cures[1],
    )


async def _plugin(adapter: Adapter) -> CheckResult:
    if found := await adapter.plugin(ASK_S):
        return CheckResult("transfer plugin", Weight.OK, found)
    return CheckResult(
        "transfer plugin",
        Weight.SLOW,
        "not there: the server loads each version from a folder, many times slower, and only from "
        "a file system that it shares with the worker",
        "install infra/server into its environment, set NCCL_CUMEM_ENABLE=0, start it with "
        f"{adapter.start.plugin_flag}",
    )


async def _spread(adapter: Adapter) -> list[CheckResult]:
    """For a server of several processes only: whether weights reach all of them."""
    try:
        ranks = await adapter.ranks(ASK_S, with_stages=True)
    except (ServerError, LookupError, TypeError, ValueError) as err:
        return [CheckResult("ranks", Weight.BROKEN, f"unknown: {err}", adapter.cures[0])]
    found, cure = adapter.refusal(ranks)
    if found:
        return [CheckResult("ranks", Weight.BROKEN, found, cure)]
    several = CheckResult("ranks", Weight.OK, f"{ranks.total}, each gets its shard")
    return [several] if ranks.total > 1 else []


async def _answers(adapter: Adapter) -> CheckResult:
    """One greedy token, at a temperature where raw and processed log-probs differ."""
    name, found = "log-probs", list[float]()
    try:
        for temperature in (1.0, 1e-3):
            body = adapter.body(_request(temperature))
            answer = adapter.answer(await adapter.http.post(adapter.generate_route, body, ASK_S))
            found += answer.logprobs[:1]
    except (ServerError, AnswerError) as err:
        message = f"a request of one token failed: {err}"
        return CheckResult(name, Weight.BROKEN, message, "see the server's log")
    if len(found) < 2:
        message = "it was answered without a token: is the server paused?"
        return CheckResult(name, Weight.BROKEN, message, "see the server's log")
    # At a temperature near 0 the likeliest token is certain, if the log-prob is of what was drawn.
    is_flat, is_certain = (logprob > _CERTAIN for logprob in found)
    if is_certain and is_flat:
        message = "cannot be compared: the model is certain of its first token"
        return CheckResult(name, Weight.OK, message)
    if is_certain:
        return CheckResult(name, Weight.OK, "of the sampled distribution")
    return CheckResult(
        name,
        Weight.BROKEN,
        "raw, not of the distribution that is sampled from: wrong above temperature 1 or below, "
        "and with top_p or top_k",
        "start it with --logprobs-mode processed_logprobs",
    )


def _request(temperature: float) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"check{temperature:.0e}",
        token_ids=[1, 2, 3],
        max_new_tokens=1,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        seed=1,
        stop_token_ids=[],
        experts_start=None,
        salt=f"check{temperature:.0e}",
    )


def _exposed(url: str) -> CheckResult:
    """Whether the control routes answer on this machine's outer addresses too."""
    parts: Any = urlsplit(url)
    name = "interface"
    danger = "can change weights, for control routes ask for no key"
    if not is_loopback(url):
        found = f"{parts.hostname} is no loopback: whoever reaches it {danger}"
        cure = "a private interface, or a firewall, that only workers reach"
        return CheckResult(name, Weight.SLOW, found, cure)
    for address in _outer_addresses():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            if probe.connect_ex((address, parts.port or 80)) == 0:
                found = f"it answers on {address} too: whoever reaches that {danger}"
                return CheckResult(name, Weight.BROKEN, found, "start it with --host 127.0.0.1")
    return CheckResult(name, Weight.OK, "loopback only")


def _outer_addresses() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        return []
    return sorted({str(row[4][0]) for row in found if not is_loopback(str(row[4][0]))})
