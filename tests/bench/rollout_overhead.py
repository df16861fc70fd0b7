"""Tokens per second through our rollout worker, over a bare asyncio client of the same server.

    python -m tests.bench.rollout_overhead --rounds 5 --json tests/bench/results/overhead-DATE.json

The server is vLLM on the CPU with the demo's model. The bare client posts the same requests, as
many at once, and decodes the answers; the worker does all that a worker does (queue, gate, checks,
reward, events, transactions) on the in-memory log. Rounds alternate, so that both see the same
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from schemas.events import Tensor, Trajectory
from streams.codec import decoded, outgoing
from streams.memory import MemoryBus
from streams.memory_log import MemoryLog
from streams.topics import POLICY_VERSIONS, PROMPTS, TOPICS, TRAJECTORIES
from tests.bench.data_path import hardware
from tests.contract.engine_rigs import announced, version_weights
from tests.servers.real import long_model, real_engine, vllm_server
from tests.unit.roles.stand import EXAMPLE, make_prompt
from workers.config_load import load
from workers.context import Context
from workers.engines.base import Sampling
from workers.engines.served.request import seed_of
from workers.rollout.reward import make_verifier
from workers.rollout.sampling import Sampler
from workers.rollout.worker import make_worker
from workers.stage import StageLoop
from workers.tokenizer import Tokenizer
from workers.weights.file import FileWeightChannel, FileWeightServer

IDS = np.array([1, 8, 4, 9, 4, 7, 8], np.int32)
GOAL = 0.95


class Ours:
    """The worker on an in-memory log."""

    def __init__(self, url: str, folder: Path, slots: int, tokens: int) -> None:
        self._log = MemoryLog()
        for topic in TOPICS:
            self._log.create(f"demo.{topic.name}", 1 if topic.single_partition else 2)
        self._pen = MemoryBus(self._log, "demo").producer("bench")
        self._tokens = tokens
        self._group = 0
        model = long_model(folder)
        engine = real_engine("vllm", url, model, folder, limit=slots)
        config = load([EXAMPLE], [f"run.dir={folder}"])
        bus = MemoryBus(self._log, "demo")
        context = Context(config=config, bus=bus, role="rollout", ordinal=0, instance="bench")
        sampler = Sampler(
            engine=engine,
            verifier=make_verifier(config.reward),
            tokenizer=Tokenizer.load(model),
            sampling=Sampling(temperature=0.1, max_new_tokens=tokens),
            max_attempts=1,
            deadline_s=600.0,
        )
        self._worker: StageLoop = make_worker(context, bus, engine, FileWeightChannel(), sampler)
        weights = FileWeightServer(folder / "weights", keep=2)
        event = announced(weights, weights.publish(0, version_weights("vllm", 0)))
        self._pen.commit([outgoing(POLICY_VERSIONS, event)])

    def run(self, num: int) -> float:
        """Tokens per second of `num` samples, from issuing to the last commit."""
        reader = MemoryBus(self._log, "demo")
        before = sum(end for end in reader.ends(TRAJECTORIES.name).values())
        started_s = time.perf_counter()
        self._group += 1
        prompts = [
            make_prompt(str(self._group), n, num, token_ids=Tensor.of(IDS), answer="1", seed=0)
            for n in range(num)
        ]
        self._pen.commit([outgoing(PROMPTS, prompt, partition=0) for prompt in prompts])
        while sum(reader.ends(TRAJECTORIES.name).values()) < before + num:
            self._worker.turn()
        seconds = time.perf_counter() - started_s
        raws = reader.reader(reader.beginnings(TRAJECTORIES.name)).poll(100_000, 0.0)
        events = [e for e in (decoded(raw).event for raw in raws) if isinstance(e, Trajectory)]
        mine = [e for e in events if e.group_id == str(self._group)]
        return sum(len(s.token_ids) for e in mine for s in e.segments[1:]) / seconds

    def close(self) -> None:
        self._worker.close()


async def bare(url: str, num: int, slots: int, tokens: int, round_: int) -> float:
    """The same requests, `slots` at once."""
    room = asyncio.Semaphore(slots)

    async def one(session: aiohttp.ClientSession, number: int) -> int:
        body = {
            "token_ids": IDS.tolist(),
            "sampling_params": {
                "max_tokens": tokens, "temperature": 0.1, "top_p": 1.0, "logprobs": 0,
                "seed": seed_of(0, f"{round_}/{number}", 0), "stop_token_ids": [2],
                "detokenize": False,
            },
            "cache_salt": "bench",
        }  # fmt: skip
        async with room, session.post(f"{url}/inference/v1/generate", json=body) as answer:
            return len((await answer.json())["choices"][0]["token_ids"])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        started_s = time.perf_counter()
        counts = await asyncio.gather(*(one(session, number) for number in range(num)))
        return sum(counts) / (time.perf_counter() - started_s)


def measure(url: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Alternate between the two."""
    ours = Ours(url, folder, args.slots, args.tokens)
    rows = []
    try:
        ours.run(args.slots)  # pulls the version, and warms up
        for round_ in range(args.rounds):
            theirs = asyncio.run(bare(url, args.samples, args.slots, args.tokens, round_))
            rows.append((ours.run(args.samples), theirs))
            print(f"worker {rows[-1][0]:,.0f}, bare {rows[-1][1]:,.0f} tokens/s")  # noqa: T201
    finally:
        ours.close()
    return {
        "samples": args.samples,
        "tokens": args.tokens,
        "slots": args.slots,
        "worker_tokens_per_s": [row[0] for row in rows],
        "bare_tokens_per_s": [row[1] for row in rows],
        "ratio": statistics.median(row[0] / row[1] for row in rows),
        "goal": GOAL,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, vllm_server(Path(folder)) as url:
        result = measure(url, Path(folder), args)
    print(f"worker over bare client: {result['ratio']:.3f} (goal {GOAL})")  # noqa: T201
    if args.json:
        told = {"hardware": hardware(), **result}
        Path(args.json).write_text(json.dumps(told, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
