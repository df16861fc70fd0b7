"""Check of a running server: what it lacks for being driven from here, cost and cure.

Asked of the server itself, without changing anything: two requests of one token.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from rlstreams.workers.engines.served.adapter import adapter_of
from rlstreams.workers.engines.served.facts import TESTED, Kind, ServerFacts, ask_facts
from rlstreams.workers.engines.served.http import ServerError, ServerHttp
from rlstreams.workers.engines.served.ranks import ask_ranks
from rlstreams.workers.engines.served.wire import Answer, AnswerError, GenerateRequest

ASK_S = 60.0  # the first request of a fresh server compiles
_PROBE_S = 0.5
START = "start it, with what `rlstreams engine command vllm|sglang CONFIG` prints"


class Weight(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    SLOW = "slow"  # works, at a price
    BROKEN = "broken"  # cannot be used


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    weight: Weight
    found: str
    cure: str = ""


async def check_server(url: str) -> tuple[Finding, ...]:
    """Everything that can be asked of `url`."""
    http = ServerHttp(url)
    try:
        try:
            facts = await ask_facts(http, ASK_S)
            kept = await adapter_of(facts.kind).keeps_records(http, ASK_S)
            facts = replace(facts, keeps_records=kept)
        except ServerError as err:
            broken = Weight.BROKEN
            return (Finding(name="server", weight=broken, found=str(err), cure=START),)
        ask = _vllm_findings if facts.kind is Kind.VLLM else _sglang_findings
        asked = await ask(http, facts)
        spread = await _spread(http, facts)
        return (_version(facts), *asked, *spread, await _answers(http, facts), *_exposed(url))
    finally:
        await http.close()


def is_usable(findings: Sequence[Finding]) -> bool:
    """Whether nothing is broken."""
    return all(finding.weight is not Weight.BROKEN for finding in findings)


def _version(facts: ServerFacts) -> Finding:
    found = f"{facts.name}, model {facts.model}, at most {facts.max_tokens} tokens"
    if facts.is_tested:
        return Finding(name="version", weight=Weight.OK, found=found)
    return Finding(
        name="version",
        weight=Weight.BROKEN,
        found=f"{found}; rlstreams was run with {', '.join(TESTED[facts.kind])} only",
        cure="use one of those, or set engine.allow_untested = true",
    )


def _route(facts: ServerFacts, name: str, routes: Sequence[str], cost: str, cure: str) -> Finding:
    missing = [route for route in routes if route not in facts.routes]
    if not missing:
        return Finding(name=name, weight=Weight.OK, found=", ".join(routes))
    return Finding(
        name=name, weight=Weight.BROKEN, found=f"no {', '.join(missing)}: {cost}", cure=cure
    )


def _spans(facts: ServerFacts) -> Finding:
    if facts.tells_versions:
        by = "our plugin's records" if facts.keeps_records else "the server"
        return Finding(name="version spans", weight=Weight.OK, found=f"told by {by}, per token")
    return Finding(
        name="version spans",
        weight=Weight.SLOW,
        found="not told: each pull ends the running requests, which are resumed with their tokens "
        "so far",
        cure="install infra/server into its environment" if facts.kind is Kind.VLLM else "",
    )


async def _vllm_findings(http: ServerHttp, facts: ServerFacts) -> tuple[Finding, ...]:
    control = ("/pause", "/resume", "/update_weights", "/collective_rpc")
    token = ("/inference/v1/generate",)
    return (
        _route(
            facts, "development routes", control, "weights cannot change while it runs",
            "start it with VLLM_SERVER_DEV_MODE=1",
        ),
        _route(
            facts, "token route", token, "token ids cannot go in and out",
            "start it with --enable-scale-out",
        ),
        _spans(facts),
        await _vllm_plugin(http),
    )  # fmt: skip


async def _vllm_plugin(http: ServerHttp) -> Finding:
    """Our plugin takes an empty greeting, more than once; every other one refuses it."""
    try:
        await http.post("/init_weight_transfer_engine", {"init_info": {}}, ASK_S)
    except ServerError:
        return _no_plugin("""--weight-transfer-config '{"backend":"rlstreams"}'""")
    found = "weights go straight into its parameters"
    return Finding(name="transfer plugin", weight=Weight.OK, found=found)


async def _sglang_findings(http: ServerHttp, facts: ServerFacts) -> tuple[Finding, ...]:
    del http
    control = ("/pause_generation", "/continue_generation", "/update_weight_version")
    loaders = str(facts.settings.get("custom_weight_loader"))
    plugin = (
        Finding(name="transfer plugin", weight=Weight.OK, found=loaders)
        if "rlstreams_server" in loaders
        else _no_plugin("--custom-weight-loader rlstreams_server.sglang.receive")
    )
    tokenizer = Finding(name="token ids", weight=Weight.OK, found="no tokenizer in the way")
    if not facts.settings.get("skip_tokenizer_init"):
        tokenizer = Finding(
            name="token ids",
            weight=Weight.BROKEN,
            found="it has a tokenizer: answers are text, without token ids",
            cure="start it with --skip-tokenizer-init",
        )
    return (
        _route(facts, "control routes", control, "weights cannot change safely", "a newer SGLang"),
        tokenizer,
        _spans(facts),
        plugin,
    )


async def _spread(http: ServerHttp, facts: ServerFacts) -> tuple[Finding, ...]:
    """Only of a server with several processes: whether weights reach all of them."""
    name, broken = "ranks", Weight.BROKEN
    try:
        ranks = await ask_ranks(http, facts, ASK_S)
        if facts.kind is Kind.VLLM and ranks.total > 1 and "/server_info" in facts.routes:
            told = await http.get("/server_info?config_format=json", ASK_S)
            parallel = told["vllm_config"]["parallel_config"]
            ranks = replace(ranks, stages=int(parallel["pipeline_parallel_size"]))
    except (ServerError, LookupError, TypeError, ValueError) as err:
        cure = "start it with VLLM_SERVER_DEV_MODE=1" if facts.kind is Kind.VLLM else ""
        return (Finding(name=name, weight=broken, found=f"not told: {err}", cure=cure),)
    found, cure = ranks.refusal(facts.kind)
    if found:
        return (Finding(name=name, weight=broken, found=found, cure=cure),)
    if ranks.total == 1:
        return ()
    found = f"{ranks.total}, each gets its shard"
    return (Finding(name=name, weight=Weight.OK, found=found),)


def _no_plugin(flag: str) -> Finding:
    return Finding(
        name="transfer plugin",
        weight=Weight.SLOW,
        found="not there: the server loads each version from a folder, many times slower, and only "
        "from a file system that it shares with the worker",
        cure=f"install infra/server into its environment, set NCCL_CUMEM_ENABLE=0, start it "
        f"with {flag}",
    )


async def _answers(http: ServerHttp, facts: ServerFacts) -> Finding:
    """One greedy token, at a temperature where raw and processed log-probs differ."""
    adapter = adapter_of(facts.kind)
    try:
        cold, hot = [
            _first(
                adapter.answer(
                    await http.post(adapter.generate_route, adapter.body(_request(t), facts), ASK_S)
                )
            )
            for t in (1.0, 1e-3)
        ]
    except (ServerError, AnswerError) as err:
        return Finding(
            name="log-probs",
            weight=Weight.BROKEN,
            found=f"a request of one token failed: {err}",
            cure="see the server's log",
        )
    # At a temperature near 0 the likeliest token is certain, if the log-prob is of what was drawn.
    certain = hot > -0.01
    flat = cold > -0.01
    if certain and not flat:
        return Finding(name="log-probs", weight=Weight.OK, found="of the sampled distribution")
    if certain:
        return Finding(
            name="log-probs",
            weight=Weight.OK,
            found="could not be told apart: the model is certain of its first token",
        )
    return Finding(
        name="log-probs",
        weight=Weight.BROKEN,
        found="raw, not of the distribution that is sampled from: wrong above temperature 1 or "
        "below, and with top_p or top_k",
        cure="start it with --logprobs-mode processed_logprobs",
    )


def _first(answer: Answer) -> float:
    if not answer.logprobs:
        raise AnswerError("it was answered without a token: is the server paused?")
    return answer.logprobs[0]


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


def _exposed(url: str) -> tuple[Finding, ...]:
    """Whether the control routes answer on this machine's outer addresses too."""
    parts: Any = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return (
            Finding(
                name="interface",
                weight=Weight.SLOW,
                found=f"{parts.hostname} is no loopback: whoever reaches it can change weights, "
                "for control routes ask for no key",
                cure="a private interface, or a firewall, that only workers reach",
            ),
        )
    for address in _outer_addresses():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            if probe.connect_ex((address, parts.port or 80)) == 0:
                return (
                    Finding(
                        name="interface",
                        weight=Weight.BROKEN,
                        found=f"it answers on {address} too: whoever reaches that can change "
                        "weights, for control routes ask for no key",
                        cure="start it with --host 127.0.0.1",
                    ),
                )
    return (Finding(name="interface", weight=Weight.OK, found="loopback only"),)


def _outer_addresses() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        return []
    return sorted({str(row[4][0]) for row in found if not str(row[4][0]).startswith("127.")})
