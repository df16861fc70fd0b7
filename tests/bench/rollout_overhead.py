"""Tokens per second through our rollout worker, over a bare asyncio client of the same server.

    python -m tests.bench.rollout_overhead --rounds 6 --json tests/bench/results/overhead-DATE.json

The server is vLLM on the CPU with the demo's model. The bare client posts the very requests that
the worker makes (ids, seeds, limits), as many at once, for log-probs as the server writes them, or
with `--records` as our plugin does, and decodes the answers; the worker does all
that a worker does (queue, gate, checks, reward, events, transactions) on the in-memory log. Both
sample as many tokens, within 2 %, which is checked; with `--fixed` no token ends an answer, for a
server that samples otherwise in other company. Rounds alternate in who goes first, so that both see
the same machine; the client's processor time is told beside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from rlstreams.schemas.events import PolicyPublished, Tensor, Trajectory
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.record import RawRecord
from rlstreams.streams.log.topics import POLICY_VERSIONS, PROMPTS, TOPICS, TRAJECTORIES
from rlstreams.workers.config.load import load
from rlstreams.workers.engines.base import Sampling
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.facts import Kind, ServerFacts
from rlstreams.workers.engines.served.http import ServerHttp
from rlstreams.workers.engines.served.running import seed_of
from rlstreams.workers.engines.served.vllm import VllmAdapter
from rlstreams.workers.engines.served.wire import GenerateRequest
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.rollout.sampling import Sampler
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.rollout.worker import make_worker
from rlstreams.workers.weights.channel import Pulled, WeightChannel
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from tests.bench.hardware import hardware
from tests.contract.engine_rigs import announced, version_weights
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog
from tests.servers.real import long_model, real_engine, vllm_server
from tests.unit.roles.stand import EXAMPLE, make_prompt

IDS = np.array([1, 8, 4, 9, 4, 7, 8], np.int32)
EOS = 2  # of the demo model
TEMPERATURE = 1.0
BEAT_S = 1.0  # between two looks at the server, as users have it
GOAL = 0.95
NO_RECORDS = ServerFacts(
    kind=Kind.VLLM, version="", model="", max_tokens=0, routes=frozenset(), settings={}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One round of one side."""

    tokens: int
    seconds: float
    cpu_s: float  # of this process: the client's side

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens over wall-clock time."""
        return self.tokens / self.seconds


class Ours:
    """The worker on an in-memory log."""

    def __init__(
        self,
        engine: ServedEngine,
        folder: Path,
        args: argparse.Namespace,
        weights: Callable[[int], Mapping[str, torch.Tensor]],
    ) -> None:
        """
        Args:
            args: `model` is the folder of the tokenizer.
            weights: of each version.
        """
        self._log = MemoryLog()
        for topic in TOPICS:
            self._log.create(f"demo.{topic.name}", 1 if topic.single_partition else 2)
        self._pen = MemoryBus(self._log, "demo").producer("bench")
        self.pulled: list[Pulled] = []
        self._prompt, self._args = prompt_of(args), args
        pull = engine.pull

        async def noted(published: PolicyPublished, channel: WeightChannel) -> Pulled:
            self.pulled.append(await pull(published, channel))
            return self.pulled[-1]

        engine.pull = noted  # type: ignore[method-assign]
        config = load([EXAMPLE], [f"run.dir={folder}"])
        bus = MemoryBus(self._log, "demo")
        context = Context(config=config, bus=bus, role="rollout", ordinal=0, instance="bench")
        sampler = Sampler(
            engine=engine,
            verifier=make_verifier(config.reward),
            tokenizer=Tokenizer.load(Path(args.model)),
            sampling=Sampling(temperature=TEMPERATURE, max_new_tokens=args.tokens),
            max_attempts=1,
            deadline_s=600.0,
        )
        self._worker: StageLoop = make_worker(context, bus, engine, FileWeightChannel(), sampler)
        server = FileWeightServer(folder / "weights", keep=args.pulls + 1)
        self._versions = [
            announced(server, server.publish(v, weights(v))) for v in range(args.pulls + 1)
        ]
        self.announce()

    def announce(self) -> None:
        """The next version, which the worker then pulls."""
        self._pen.commit([outgoing(POLICY_VERSIONS, self._versions.pop(0))])

    def run(self, group_id: str, num: int, announce_after_s: Sequence[float] = ()) -> Run:
        """`num` samples of one group, from issuing to the last commit."""
        left_s = list(announce_after_s)
        ends = MemoryBus(self._log, "demo").ends(TRAJECTORIES.name)
        reader = MemoryBus(self._log, "demo").reader(ends)
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        prompts = [
            make_prompt(group_id, n, num, token_ids=Tensor.of(self._prompt), answer="1", seed=0)
            for n in range(num)
        ]
        self._pen.commit([outgoing(PROMPTS, prompt, partition=0) for prompt in prompts])
        raws: list[RawRecord] = []
        while len(raws) < num:
            self._worker.tick()
            raws += reader.poll(num, 0.0)
            if left_s and time.perf_counter() > started_s + left_s[0]:
                left_s.pop(0)
                self.announce()
            late = time.perf_counter() > started_s + self._args.round_s
            assert not late, f"not done after {self._args.round_s:g} s"
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        reader.close()
        events = [decoded(raw).event for raw in raws]
        mine = [event for event in events if isinstance(event, Trajectory)]
        tokens = sum(len(segment.token_ids) for e in mine for segment in e.segments[1:])
        return Run(tokens=tokens, seconds=seconds, cpu_s=cpu_s)

    def close(self) -> None:
        self._worker.close()


def prompt_of(args: argparse.Namespace) -> npt.NDArray[np.int32]:
    """The same for all samples: its keys and values are computed once."""
    if not args.prompt:
        return IDS
    return np.random.default_rng(0).integers(4, args.vocabulary, args.prompt, np.int32)


async def bare(url: str, group_id: str, num: int, args: argparse.Namespace) -> Run:
    """The same requests, as many at once."""
    room, adapter = (
        asyncio.Semaphore(args.slots),
        VllmAdapter(ServerHttp(url), replace(NO_RECORDS, keeps_records=args.records), args.round_s),
    )

    async def one(session: aiohttp.ClientSession, number: int) -> int:
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            token_ids=prompt_of(args).tolist(),
            max_new_tokens=args.tokens,
            temperature=TEMPERATURE,
            top_p=1.0,
            top_k=0,
            seed=seed_of(0, f"{group_id}/{number}/0", len(prompt_of(args))),
            stop_token_ids=[] if args.fixed else [EOS],
            experts_start=None,
            salt="bench",
        )
        body = adapter.body(request)
        async with room, session.post(f"{url}{adapter.generate_route}", json=body) as answer:
            return len((await answer.json())["choices"][0]["token_ids"])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        counts = await asyncio.gather(*(one(session, number) for number in range(num)))
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    return Run(tokens=sum(counts), seconds=seconds, cpu_s=cpu_s)


def measure(url: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Alternate between the two."""
    weights: Callable[[int], Mapping[str, torch.Tensor]] = partial(version_weights, "vllm")
    if args.model:
        of_folder = load_file(Path(args.model) / "model.safetensors")
        weights = lambda _: of_folder  # noqa: E731
    args.model = args.model or str(long_model(folder))
    model = Path(args.model)
    changes = {"stops": not args.fixed, "limit": args.slots, "beat_s": BEAT_S}
    ours = Ours(real_engine("vllm", url, model, folder, **changes), folder, args, weights)
    rows: list[tuple[Run, Run]] = []

    def theirs(group_id: str, num: int = args.samples) -> Run:
        return asyncio.run(bare(url, group_id, num, args))

    try:
        ours.run("0", args.warm or args.samples)  # pulls; the server compiles what it needs
        theirs("0", args.warm or args.samples)
        for round_ in range(args.rounds):
            group_id = str(round_ + 1)
            if round_ % 2:
                through, direct = ours.run(group_id, args.samples), theirs(group_id)
            else:
                direct, through = theirs(group_id), ours.run(group_id, args.samples)
            # Equal seeds; rounding differs with who shares a batch, and may move an end.
            same = abs(through.tokens - direct.tokens) <= 0.02 * direct.tokens
            assert same, f"not the same work: {through}, {direct}"
            rows.append((through, direct))
            print(  # noqa: T201
                f"{through.tokens} tokens: worker {through.tokens_per_s:,.0f} tokens/s "
                f"({through.cpu_s:.2f} s of CPU), bare {direct.tokens_per_s:,.0f} "
                f"({direct.cpu_s:.2f} s)"
            )
        if args.pulls:  # under load, spread over a round
            step_s = rows[-1][0].seconds / (args.pulls + 1)
            with_pulls = ours.run(
                str(args.rounds + 1), args.samples, [step_s * (n + 1) for n in range(args.pulls)]
            )
            print(f"with pulls: {with_pulls.tokens_per_s:,.0f} tokens/s, {ours.pulled}")  # noqa: T201
    finally:
        ours.close()
    pulls = [
        {"seconds": round(p.seconds, 3), "paused_s": round(p.paused_s, 3)} for p in ours.pulled
    ]
    ratios = [through.tokens_per_s / direct.tokens_per_s for through, direct in rows]
    return {
        "samples": args.samples,
        "most_tokens_each": args.tokens,
        "slots": args.slots,
        "tokens": [through.tokens for through, _ in rows],
        "worker_tokens_per_s": [round(through.tokens_per_s, 1) for through, _ in rows],
        "bare_tokens_per_s": [round(direct.tokens_per_s, 1) for _, direct in rows],
        "worker_cpu_s": [round(through.cpu_s, 3) for through, _ in rows],
        "bare_cpu_s": [round(direct.cpu_s, 3) for _, direct in rows],
        "worker_us_per_token": [round(1e6 * t.cpu_s / t.tokens, 2) for t, _ in rows],
        "pulls": pulls,
        "ratios": [round(ratio, 4) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 4),
        "goal": GOAL,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a measurement is made of."""
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--samples", type=int, default=384)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--fixed", action="store_true", help="every answer has so many tokens")
    parser.add_argument("--model", default="", help="folder instead of the demo's")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of the prompt")
    parser.add_argument("--vocabulary", type=int, default=128)
    parser.add_argument("--records", action="store_true", help="bare: log-probs by our plugin")
    parser.add_argument("--pulls", type=int, default=0, help="of one more round, under load")
    parser.add_argument("--warm", type=int, default=0, help="samples before the first round")
    parser.add_argument("--round-s", type=float, default=120.0, help="seconds of a round, at most")
    parser.add_argument("--json", default="")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, vllm_server(Path(folder)) as url:
        result = measure(url, Path(folder), args)
    report(result, args.json)


def report(result: dict[str, Any], file: str) -> None:
    """One line, and the figures in a file if one is named."""
    print(f"worker over bare client: {result['ratio']:.3f} (goal {GOAL})")  # noqa: T201
    if file:
        told = {"hardware": hardware(), **result}
        Path(file).write_text(json.dumps(told, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
