"""Processor time per token of a stream: the loop that a rollout worker runs on, against asyncio's.

    python -m tests.bench.stream_events

A process of its own answers 32 streams of 200 events, as vLLM 0.25.1 writes them, one every 5 ms;
the reading side is the adapter's own: http, dialect, joined. Rounds alternate between the loops.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aiohttp import web

from rlstreams.workers.engines.served.http import ServerHttp
from rlstreams.workers.engines.served.vllm import VllmDialect
from rlstreams.workers.engines.served.wire import joined
from rlstreams.workers.engines.thread import new_loop
from tests.bench.hardware import hardware

NUM_STREAMS, NUM_EVENTS, EVERY_S = 32, 200, 0.005
DEADLINE_S = 60.0
LOGPROBS = {"content": [{"token": "token_id:17", "logprob": -0.3123, "top_logprobs": []}]}
CHOICE = {"index": 0, "token_ids": [17], "logprobs": LOGPROBS, "finish_reason": None}
EVENT = b"data: " + json.dumps({"request_id": "x", "choices": [CHOICE]}).encode() + b"\n\n"


async def answer(request: web.Request) -> web.StreamResponse:
    """One stream."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    for _ in range(NUM_EVENTS):
        await stream.write(EVENT)
        await asyncio.sleep(EVERY_S)
    await stream.write(b"data: [DONE]\n\n")
    return stream


def serve(told: Connection) -> None:
    """Answer until killed; the port is told first."""

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        told.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


async def read(url: str) -> float:
    """Microseconds of this process per event."""
    http, dialect = ServerHttp(url), VllmDialect()

    async def one() -> int:
        events = http.stream("/", {}, DEADLINE_S, what="a stream")
        return len(joined([dialect.piece(event, 0) async for event in events]).token_ids)

    started_s = time.process_time()
    counts = await asyncio.gather(*(one() for _ in range(NUM_STREAMS)))
    cpu_s = time.process_time() - started_s
    await http.close()
    assert counts == NUM_STREAMS * [NUM_EVENTS], counts
    return 1e6 * cpu_s / sum(counts)


def measured(make_loop: Callable[[], asyncio.AbstractEventLoop], url: str) -> float:
    """One round on a fresh loop."""
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(read(url))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="")
    args, _ = parser.parse_known_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    assert ours.poll(DEADLINE_S), "the server did not come up"
    url = f"http://127.0.0.1:{ours.recv()}"
    loops = {"worker": new_loop, "asyncio": asyncio.new_event_loop}
    found = {name: list[float]() for name in loops}
    for _ in range(args.rounds + 1):
        for name, make_loop in loops.items():
            found[name].append(measured(make_loop, url))
    server.kill()
    us = {name: statistics.median(values[1:]) for name, values in found.items()}
    told = {"us_per_event": us, "ratio": us["worker"] / us["asyncio"], "rounds": found}
    print(  # noqa: T201
        f"{us['worker']:.1f} us a token on the worker's loop, {us['asyncio']:.1f} on asyncio's: "
        f"{told['ratio']:.2f}"
    )
    if args.json:
        text = json.dumps({"hardware": hardware(), **told}, indent=1)
        Path(args.json).write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
