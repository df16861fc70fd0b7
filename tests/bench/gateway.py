"""What the gateway's HTTP costs a call, over a bare application on the same server.

    python tests/bench/gateway.py [--calls N] [--save]

Both servers run in one process, on an event loop each; the client is another process, with
connections that stay. The bare application reads the body and answers with as many words. Behind
the gateway a call is answered at once, by nobody: what is measured is reading, key, canonical hash
and answer. Rounds alternate; figures are of the median round; *cpu*
is the server's, for a call. *Stream* is the same as a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.hardware import hardware

ROUNDS = 3
SHAPES = (  # callers, bytes of a body, as a stream
    (1, 2_000, False),
    (16, 2_000, False),
    (16, 2_000, True),
    (64, 20_000, False),
    (16, 200_000, False),
)
ANSWER_TOKENS = 200


def body_of(size: int, is_stream: bool) -> bytes:
    """A dialogue of about `size` bytes, in messages of 500."""
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": "word " * 100} for n in range(size // 500)
    ]
    messages = [*turns, {"role": "user", "content": "go on"}]
    return json.dumps({"model": "m", "messages": messages, "stream": is_stream}).encode()


async def call_all(url: str, key: str, shape: tuple[int, int, bool], calls: int) -> None:
    """The client's process: prints latencies in milliseconds and calls a second."""
    import aiohttp

    callers, size, stream = shape
    body, taken = body_of(size, stream), []
    left = iter(range(calls))
    connector = aiohttp.TCPConnector(limit=callers)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    async def caller() -> None:
        for _ in left:
            begun = time.perf_counter()
            async with client.post(url, data=body) as answer:
                await answer.read()
                answer.raise_for_status()
            taken.append(1000 * (time.perf_counter() - begun))

    async with aiohttp.ClientSession(connector=connector, headers=headers) as client:
        begun = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        seconds = time.perf_counter() - begun
    figures = {
        "calls_per_s": calls / seconds,
        "p50_ms": statistics.median(taken),
        "p99_ms": statistics.quantiles(taken, n=100)[98],
    }
    sys.stdout.write(json.dumps(figures))


def measured(url: str, key: str, shape: tuple[int, int, bool], calls: int) -> Any:
    """One round of one client's process."""
    asked = json.dumps([url, key, shape, calls])
    begun = time.process_time()
    done = subprocess.run([sys.executable, __file__, "--client", asked], check=True,
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    cpu_ms = 1000 * (time.process_time() - begun) / calls  # of the server: this process
    return {**json.loads(done.stdout), "cpu_ms": cpu_ms}


def rounds(calls: int) -> list[dict[str, object]]:
    """All shapes."""
    from rlstreams.workers.engines.thread import EngineThread
    from tests.bench.gateway_parts import bare_server, gateway_server

    thread, bare_thread = EngineThread("gateway"), EngineThread("bare")
    bare, bare_url = bare_thread.wait(bare_server(ANSWER_TOKENS), 20, "the bare server")
    server, key = thread.wait(gateway_server(ANSWER_TOKENS), 20, "the gateway")
    url, rows = f"{server.url}/v1/chat/completions", []
    for shape in SHAPES:
        found: dict[str, list[Any]] = {"bare": [], "gateway": []}
        for number in range(ROUNDS):
            pairs = [("bare", bare_url), ("gateway", url)]
            for name, at in pairs if number % 2 else reversed(pairs):
                found[name].append(measured(at, key, shape, calls))
        figures = {
            f"{name}_{figure}": round(statistics.median(r[figure] for r in made), 2)
            for name, made in found.items()
            for figure in ("calls_per_s", "p50_ms", "p99_ms", "cpu_ms")
        }
        callers, size, stream = shape
        rows.append({"callers": callers, "body_bytes": size, "stream": stream, **figures})
        sys.stdout.write(f"{rows[-1]}\n")
    bare.should_exit = True
    thread.wait(server.close(), 20, "the gateway's end")
    for ending in (thread, bare_thread):
        ending.close()
    return rows


def main() -> None:
    """Measure, and say or save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500, help="of each round")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        asyncio.run(call_all(*json.loads(given.client)))
        return
    made = {"hardware": hardware(), "calls": given.calls, "rounds": ROUNDS,
            "rows": rounds(given.calls)}  # fmt: skip
    if given.save:
        name = f"results/gateway-{date.today()}.json"
        (Path(__file__).parent / name).write_text(json.dumps(made, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
