"""A server that answers nonsense: each kind of it is an error with server, request and field."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlstreams.workers.model.base import EngineError
from tests.contract.engine_rigs import collect, request
from tests.servers.vllm_routes import npy
from tests.servers.world import World
from tests.waiting import until

Answer = dict[str, Any]


def choice(change: Callable[[Answer], object]) -> Callable[[Answer], Answer]:
    """Change the only choice of vLLM's answer."""

    def spoil(answer: Answer) -> Answer:
        change(answer["choices"][0])
        return answer

    return spoil


def set_logprob(value: object) -> Callable[[Answer], Answer]:
    return choice(lambda c: c["logprobs"]["content"][1].__setitem__("logprob", value))


def set_token(value: int) -> Callable[[Answer], Answer]:
    def change(c: Answer) -> None:
        c["token_ids"][1] = value
        c["logprobs"]["content"][1]["token_id"] = value

    return choice(change)


ROWS = 7 + 4 - 1  # prompt and answer, but for the last token
TWICE = np.zeros((ROWS, 1, 2), np.uint8)
BEYOND = np.tile(np.array([0, 200], np.uint8), (ROWS, 1, 1))


def spans(*rows: tuple[str, int, int]) -> Callable[[Answer], Answer]:
    found = [{"version": v, "start": a, "end": b} for v, a, b in rows]
    return choice(lambda c: c.__setitem__("weight_versions", found))


SPOILED = {
    "fewer log-probs": (
        choice(lambda c: c["logprobs"]["content"].pop()),
        "logprobs.content has 3 entries for 4 tokens",
    ),
    "no log-probs": (choice(lambda c: c.__setitem__("logprobs", None)), "0 entries for 4 tokens"),
    "log-prob of another token": (
        choice(lambda c: c["logprobs"]["content"][2].__setitem__("token_id", 15)),
        r"logprobs.content\[2\] is of token 15",
    ),
    "id above the vocabulary": (set_token(16), r"token_ids\[1\] = 16 is outside the vocabulary"),
    "negative id": (set_token(-1), r"token_ids\[1\] = -1 is outside"),
    "clamped log-prob": (set_logprob(-9999.0), r"logprobs\[1\] = -9999.0"),
    "positive log-prob": (set_logprob(0.5), r"logprobs\[1\] = 0.5 is no log-prob"),
    "log-prob as text": (set_logprob("-1"), "logprob should be int or float, is '-1'"),
    "log-prob that is no object": (
        choice(lambda c: c["logprobs"]["content"].__setitem__(1, None)),
        r"logprobs.content\[1\] is of token None",
    ),
    "too many tokens": (
        choice(
            lambda c: (
                c["token_ids"].append(3),
                c["logprobs"]["content"].append({"token_id": 3, "logprob": -1.0}),
            )
        ),
        "5 tokens, at most 4",
    ),
    "stop without end token": (
        choice(lambda c: c.__setitem__("finish_reason", "stop")),
        "finish_reason is stop, but the last token",
    ),
    "unknown reason": (
        choice(lambda c: c.__setitem__("finish_reason", "error")),
        "finish_reason should be one of",
    ),
    "no reason": (
        choice(lambda c: c.__setitem__("finish_reason", None)),
        "finish_reason should be str, is None",
    ),
    "no choice": (lambda a: {**a, "choices": []}, "choices should hold one choice, holds 0"),
    "another shape": (lambda a: {"detail": "?"}, "field choices should be list, is missing"),
    "experts of another shape": (
        choice(lambda c: c.__setitem__("routed_experts", npy(np.zeros((3, 1, 2), np.uint8)))),
        r"routed_experts has shape \(3, 1, 2\), should be \(10, 1, 2\)",
    ),
    "an expert twice": (
        choice(lambda c: c.__setitem__("routed_experts", npy(TWICE))),
        "row 0 names an expert twice",
    ),
    "an expert that is not there": (
        choice(lambda c: c.__setitem__("routed_experts", npy(BEYOND))),
        "expert 0 to 200, the model has 4",
    ),
    "experts that are no file": (
        choice(lambda c: c.__setitem__("routed_experts", "AAAA")),
        "routed_experts is no .npy file",
    ),
    "experts that are no text": (
        choice(lambda c: c.__setitem__("routed_experts", "\u00e9")),
        "routed_experts is no base64",
    ),
    "spans with a gap": (spans(("0-x", 0, 2), ("0-x", 3, 4)), "span 3 to 4 follows token 2"),
    "spans too short": (spans(("0-x", 0, 3)), "weight_versions end at token 3 of 4"),
    "a version that it never loaded": (
        spans(("default", 0, 4)),
        r"version 'default', but it was given \['0-",
    ),
}


def meta(name: str, change: Callable[[Any], object]) -> Callable[[Answer], Answer]:
    """Change a field of SGLang's `meta_info`."""

    def spoil(answer: Answer) -> Answer:
        found = answer["meta_info"]
        return {**answer, "meta_info": {**found, name: change(found.get(name))}}

    return spoil


SGLANG_SPOILED = {
    # orjson, with which it writes, makes null of a NaN.
    "no log-prob": (
        meta("output_token_logprobs", lambda rows: [[None, t, None] for _, t, _ in rows]),
        r"output_token_logprobs\[0\]",
    ),
    "rows without the first": (
        meta("output_token_logprobs", lambda rows: rows[1:]),
        "output_token_logprobs has 3 entries for 4 tokens",
    ),
    "experts that are no base64": (meta("routed_experts", lambda _: "\u00e9"), "no base64"),
}


@pytest.mark.parametrize(
    ("flavour", "spoiled"), [("vllm-0.32.0", SPOILED), ("sglang-0.5.17", SGLANG_SPOILED)]
)
async def test_a_wrong_answer_is_named(world: World, flavour: str, spoiled: dict[str, Any]) -> None:
    """Server, request and field are in the message, and the next good answer is taken."""
    server = world.serve(flavour)
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        for name, (spoil, message) in spoiled.items():
            server.spoil = spoil
            with pytest.raises(EngineError, match=message) as caught:
                await collect(engine, request("3/1/0", max_new_tokens=4))
            assert server.url in str(caught.value), name
            assert "request 3/1/0" in str(caught.value), name
            server.spoil = None
            if engine.trouble:
                await engine.pull(world.publish(1), world.channel)
            assert await collect(engine, request(max_new_tokens=4)), name


async def test_a_server_with_weights_that_are_not_ours_is_shut(world: World) -> None:
    """It was restarted or updated by somebody else: no request leaves before the next pull."""
    server = world.serve()
    async with world.engine() as engine:
        published = world.publish(0)
        await engine.pull(published, world.channel)
        server.core.label = "default"
        with pytest.raises(EngineError, match="default"):
            await collect(engine, request(max_new_tokens=4))
        assert "not ours" in engine.trouble
        assert engine.wants(published)
        await engine.pull(published, world.channel)
        assert await collect(engine, request(max_new_tokens=4))


async def test_spans_are_not_guessed_where_weights_changed_meanwhile(world: World) -> None:
    """A server that tells which version sampled a token, and once does not: its answer goes."""
    server = world.serve("vllm-0.32.0")
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        server.core.holds = True
        running = asyncio.create_task(collect(engine, request("3/1/0", max_new_tokens=40)))
        await until(lambda: any(j.token_ids for j in server.core.jobs.values()), "not sampled")
        server.spoil = choice(lambda c: c.__setitem__("weight_versions", None))
        await engine.pull(world.publish(1), world.channel)
        with pytest.raises(EngineError, match="weight_versions is missing"):
            await running


@pytest.mark.parametrize("status", [400, 403, 500, 503])
async def test_a_refusal_is_an_error_with_its_status(world: World, status: int) -> None:
    server = world.serve()
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        server.statuses = [status]
        with pytest.raises(EngineError, match=f'status {status}: {{"error": "no"}}'):
            await collect(engine, request())
        assert await collect(engine, request())


@pytest.mark.parametrize("flavour", ["vllm-0.32.0", "vllm-0.25.1", "sglang-0.5.17"])
async def test_an_answer_that_breaks_off_is_an_error(world: World, flavour: str) -> None:
    """Nothing of it is kept: which version its last tokens had is not known."""
    server = world.serve(flavour)
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        server.breaks_off = True
        with pytest.raises(EngineError, match=f"{server.url}: request 0/0/0 .*connection failed"):
            await collect(engine, request())
        server.breaks_off = False
        assert await collect(engine, request())


@pytest.mark.parametrize("flavour", ["vllm-0.32.0", "vllm-0.25.1"])
async def test_an_answer_that_never_comes_is_an_error(world: World, flavour: str) -> None:
    """The deadline of a request names the server, and the server is free for others."""
    server = world.serve(flavour)
    async with world.engine(request_s=0.5) as engine:
        await engine.pull(world.publish(0), world.channel)
        server.hangs = True
        with pytest.raises(EngineError, match=f"{server.url}: request .*no answer within 0.5 s"):
            await collect(engine, request())
        server.hangs = False
        assert await collect(engine, request(max_new_tokens=1))


async def test_a_server_that_breaks_off_while_it_is_looked_at_goes_on(world: World) -> None:
    """The look says that it lives; the one that waits for it meanwhile is told."""
    server = world.serve()
    async with world.engine(silent_s=60.0) as engine:
        await engine.pull(world.publish(0), world.channel)
        server.slow_routes["/health"] = 0.2
        seen = server.heard["/health"]
        await until(lambda: server.heard["/health"] > seen, "nobody looks")
        server.breaks_off = True
        with pytest.raises(EngineError, match="connection failed"):
            await collect(engine, request())
        server.breaks_off = False
        server.slow_routes.clear()
        assert await collect(engine, request())
