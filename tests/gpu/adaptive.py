"""A fixed number of requests in flight against one that adapts (`engine.adapt`), on one vLLM.

    python -m tests.gpu.adaptive --cache-gb 12 --out small.json
    python -m tests.gpu.adaptive --cache-gb 0 --out roomy.json  # all memory

A rollout worker on the in-memory log keeps the server supplied, once with `engine.adapt` and once
without, with the same samples: each has its own most tokens by its id, lognormal with mean `--mean`
and at most `--longest`, and no token ends it earlier. Figures are of `--window-s` after
`--warm-s`, while samples wait, so no tail of long answers is in them; `warming` has those before.
The server counts tokens, preemptions and its cache's use. What is left of `--limit-s` once the
server answers is divided among the sides, and shortens both periods where it must.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from safetensors.torch import load_file

from rlstreams.schemas.events import Tensor, Trajectory
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.topics import PROMPTS, TRAJECTORIES
from rlstreams.workers.engines.base import GeneratedSegment, SampleRequest
from rlstreams.workers.engines.served.capacity import Gauges
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.vllm import VllmAdapter
from rlstreams.workers.engines.served.wire import gauges_of
from tests.bench.hardware import hardware
from tests.bench.rollout_overhead import Ours
from tests.gpu.engine_contract import Bench
from tests.gpu.qwen3 import SHAPES
from tests.gpu.result import kept
from tests.gpu.workload import write_folder
from tests.memory.bus import MemoryBus
from tests.servers.real import num_generated, ready, real_engine
from tests.unit.roles.stand import make_prompt

SIDES = {"fixed": False, "adapt": True}
GROUP = 8  # samples with one prompt
SIGMA = 0.8  # of the logarithm of a length
LOOK_S = 1.0
DRAIN_S = 30.0
FIRST_S = 60.0  # until the first sample: weights are pulled before
SIDE_S = 15.0  # of a side's time for that and for what is in flight at its end
LEAST_S = 8.0  # a period that says something
THREADS = 8  # a container has fewer cores than its machine says: more threads wait for each other
MakeEngine = Callable[..., ServedEngine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The server at one moment."""

    at_s: float  # since the first sample was given
    num_tokens: float  # sampled since it was started
    gauges: Gauges
    limit: int  # requests that the worker allows it
    in_flight: int
    why: str  # what moved the limit last


class Flood(Ours):
    """A worker that never runs out of samples."""

    def __init__(self, engine: ServedEngine, url: str, *rest: Any) -> None:
        super().__init__(engine, *rest)
        self._engine, self._url = engine, url

    def flow(self, args: argparse.Namespace) -> tuple[list[Look], list[tuple]]:
        """Looks, and when a trajectory came with how many tokens; from when the server samples."""
        bus = MemoryBus(self._log, "demo")
        reader = bus.reader(bus.ends(TRAJECTORIES.name))
        looks: list[Look] = []
        came: list[tuple[float, int]] = []
        num_given, started_s = 0, 0.0
        deadline_s = time.monotonic() + FIRST_S
        until_s = args.warm_s + args.window_s  # and until there are looks, on a busy machine
        while not started_s or time.monotonic() < started_s + until_s or late(looks, args) < 2:
            while num_given - len(came) < 3 * args.slots:
                self._give(num_given // GROUP, args)
                num_given += GROUP
            self._worker.tick()
            now_s = time.monotonic()
            if not started_s:
                if any(load.in_flight for load in self._engine.server_loads):
                    started_s = now_s
                assert now_s < deadline_s, f"nothing is sampled after {FIRST_S:g} s"
                continue
            for raw in reader.poll(1000, 0.0):
                event = decoded(raw).event
                assert isinstance(event, Trajectory)
                tokens = sum(len(segment.token_ids) for segment in event.segments[1:])
                came.append((now_s - started_s, tokens))
            if now_s >= started_s + len(looks) * LOOK_S:
                looks.append(self._look(now_s - started_s))
        reader.close()
        return looks, came

    def _give(self, group: int, args: argparse.Namespace) -> None:
        prompt = np.random.default_rng(group).integers(4, args.vocabulary, args.prompt, np.int32)
        self._pen.commit([
            outgoing(PROMPTS, make_prompt(str(group), n, GROUP, token_ids=Tensor.of(prompt),
                                          answer="1", seed=0), partition=0)
            for n in range(GROUP)
        ])  # fmt: skip

    def _look(self, at_s: float) -> Look:
        (load,) = self._engine.server_loads
        return Look(at_s=at_s, num_tokens=num_generated(self._url), gauges=gauges_at(self._url),
                    limit=load.limit, in_flight=load.in_flight, why=load.why)  # fmt: skip


def late(looks: Sequence[Look], args: argparse.Namespace) -> int:
    """How many are of the window."""
    return sum(look.at_s >= args.warm_s for look in looks)


def gauges_at(url: str) -> Gauges:
    """What the server says of itself."""
    with urlopen(f"{url}/metrics", timeout=60.0) as answer:
        return gauges_of(answer.read().decode(), VllmAdapter.gauge_names)


def length_of(sample_id: str, args: argparse.Namespace) -> int:
    """Tokens of its answer: the same on both sides."""
    draw = np.random.default_rng(zlib.crc32(sample_id.encode()))
    length = draw.lognormal(np.log(args.mean) - SIGMA**2 / 2, SIGMA)
    return int(np.clip(length, 1, args.longest))


def bounded(engine: ServedEngine, args: argparse.Namespace) -> ServedEngine:
    """The same, whose answers have such lengths."""
    generate = engine.generate

    def shorter(request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        most = length_of(request.sample_id, args)
        sampling = replace(request.sampling, max_new_tokens=most)
        return generate(replace(request, sampling=sampling))

    engine.generate = shorter  # type: ignore[method-assign]
    return engine


def told(looks: Sequence[Look], came: Sequence[tuple[float, int]], from_s: float) -> dict[str, Any]:
    """Figures of the looks."""
    first, last = looks[0], looks[-1]
    seconds = max(LOOK_S, last.at_s - first.at_s)
    preempted = [look.gauges.num_preemptions or 0 for look in (first, last)]
    answered = [tokens for at_s, tokens in came if first.at_s < at_s <= last.at_s]
    return {
        "from_s": round(from_s, 1),
        "seconds": round(seconds, 1),
        "tokens_per_s": round((last.num_tokens - first.num_tokens) / seconds, 1),
        "answered_tokens_per_s": round(sum(answered) / seconds, 1),
        "answers": len(answered),
        "preemptions": preempted[1] - preempted[0],
        "preemptions_per_answer": round((preempted[1] - preempted[0]) / max(1, len(answered)), 4),
        "cache_share_mean": round(statistics.mean(look.gauges.cache_share for look in looks), 3),
        "cache_share_max": round(max(look.gauges.cache_share for look in looks), 3),
        "running_mean": round(statistics.mean(look.gauges.num_running for look in looks), 1),
        "waiting_mean": round(statistics.mean(look.gauges.num_waiting for look in looks), 1),
        "limit": [min(look.limit for look in looks), max(look.limit for look in looks)],
        "why": last.why,
    }


def quiet(url: str) -> None:
    """Until the server has none of the requests of the side before."""
    until_s = time.monotonic() + DRAIN_S
    while (left := gauges_at(url)).num_running or left.num_waiting:
        assert time.monotonic() < until_s, f"{url} still has {left} after {DRAIN_S:g} s"
        time.sleep(0.2)


def fitted(args: argparse.Namespace, num_sides: int) -> argparse.Namespace:
    """The options of the next side, its periods as short as so many sides need them to be."""
    asked_s = args.warm_s + args.window_s
    each_s = (args.until_s - time.monotonic()) / num_sides - SIDE_S
    share = min(1.0, each_s / asked_s)
    asked = {name: getattr(args, name) for name in ("warm_s", "window_s")}
    periods_s = {name: min(own_s, max(LEAST_S, share * own_s)) for name, own_s in asked.items()}
    return argparse.Namespace(**vars(args) | periods_s)


def compare(
    found: dict[str, Any],
    url: str,
    make: MakeEngine,
    weights: Callable[[int], Mapping[str, torch.Tensor]],
    folder: Path,
    args: argparse.Namespace,
) -> None:
    """Sides one after the other, on one server.

    Args:
        found: gets the figures, each side's as it ends.
        make: an engine of the server, with these changes to its settings.
    """
    found |= {side: [] for side in SIDES}
    turns: list[str] = []
    for number in range(args.rounds):
        turns += [*SIDES] if number % 2 else reversed(SIDES)  # the cold server adapts
    for number, side in enumerate(turns):
        own, name = fitted(args, len(turns) - number), folder / f"{side}-{number}"
        engine = bounded(make(name, limit=args.slots, adapts=SIDES[side]), args)
        flood = Flood(engine, url, name, args, weights)
        try:
            looks, came = flood.flow(own)
        finally:
            flood.close()
        found[side].append(told_of(looks, came, own))
        shown = {name: value for name, value in found[side][-1].items() if name != "by_second"}
        sys.stdout.write(f"{side} {json.dumps(shown)}\n")
        sys.stdout.flush()
        if number + 1 < len(turns):
            quiet(url)
    rates = {
        side: statistics.median(
            row["tokens_per_s"] or row["answered_tokens_per_s"] for row in found[side]
        )
        for side in SIDES
    }
    found["tokens_per_s_over_fixed"] = round(rates["adapt"] / rates["fixed"], 4)
    found["preemptions"] = {side: sum(row["preemptions"] for row in found[side]) for side in SIDES}


def told_of(
    looks: Sequence[Look], came: Sequence[tuple[float, int]], args: argparse.Namespace
) -> dict[str, Any]:
    """A side's figures."""
    warm = [look for look in looks if look.at_s < args.warm_s]
    steady = [look for look in looks if look.at_s >= args.warm_s]
    found = told(steady, came, args.warm_s) | {"warming": told(warm, came, 0.0)}
    found["by_second"] = [
        [round(one.at_s), one.limit, one.in_flight, round(one.gauges.cache_share, 3),
         one.gauges.num_preemptions] for one in looks[:: max(1, len(looks) // 40)]
    ]  # fmt: skip
    return found


def served(found: dict[str, Any], args: argparse.Namespace, gigabytes: float, folder: Path) -> None:
    """Start a server whose cache has so much, all that there is if 0; compare on it."""
    bound = [f"kv-cache-memory-bytes={int(gigabytes * 1e9)}"] if gigabytes else []
    own = argparse.Namespace(**vars(args) | {"arg": [*args.arg, *bound]})
    model, started_s = Path(args.model), time.perf_counter()
    bench = Bench(own, folder)
    of_folder = load_file(model / "model.safetensors")
    try:
        assert bench.process is not None
        asyncio.run(ready(bench.url, bench.process))
        found["server_start_s"] = round(time.perf_counter() - started_s, 1)

        def make(own: Path, **changes: Any) -> ServedEngine:
            return real_engine(
                "vllm", bench.url, model, own, stops=False, request_s=args.request_s, **changes
            )

        compare(found, bench.url, make, lambda _: of_folder, folder, args)
    finally:
        bench.listener.close()
        if bench.process is not None:
            bench.process.end()


def made(args: argparse.Namespace, folder: Path) -> Path:
    """A model of the shape for such lengths, whose answers end at their most tokens."""
    model = write_folder(folder / "model", args.shape, args.vocabulary)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = args.prompt + args.longest + 8
    (model / "config.json").write_text(json.dumps(config))
    return model


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="1.7b", choices=SHAPES)
    parser.add_argument("--vocabulary", type=int, default=151_936, help="the shape's")
    parser.add_argument("--cache-gb", type=float, default=0.0, help="of the server; 0: all")
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--mean", type=int, default=1000, help="tokens of an answer")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--warm-s", type=float, default=70.0)
    parser.add_argument("--window-s", type=float, default=80.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--request-s", type=float, default=600.0)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--log", default="engine.log")
    parser.add_argument("--limit-s", type=float, default=220.0, help="for all of it")
    parser.add_argument("--out", default="", help="file for the result, also of a part")
    # What `Bench` and `Ours` ask for too.
    parser.set_defaults(kind="vllm", url="", experts=False, record="", pulls=0, fixed=True,
                        until_s=math.inf)  # fmt: skip
    args = parser.parse_args(argv)
    args.tokens = args.longest
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Make the model, start the server, compare."""
    args = parse(argv)
    args.until_s = time.monotonic() + args.limit_s
    torch.set_num_threads(min(THREADS, os.cpu_count() or 1))
    args.arg += [f"max-num-seqs={args.slots}"]
    args.env += [f"OMP_NUM_THREADS={THREADS}"]
    with kept(args.out, args.limit_s) as result, tempfile.TemporaryDirectory() as name:
        result |= {"hardware": hardware(), "options": {
            name: getattr(args, name) for name in ("shape", "cache_gb", "slots", "mean", "longest",
                                                   "prompt", "warm_s", "window_s", "rounds", "arg")
        }}  # fmt: skip
        started_s = time.perf_counter()
        args.model = str(made(args, Path(name)))
        result["model_made_s"] = round(time.perf_counter() - started_s, 1)
        served(result, args, args.cache_gb, Path(name) / "served")


if __name__ == "__main__":
    main()
