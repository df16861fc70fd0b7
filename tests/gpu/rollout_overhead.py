"""What a rollout worker costs beside a bare client of the same vLLM server, on a GPU.

    python -m tests.gpu.rollout_overhead --shape qwen3-1.7b --slots 512 --samples 512 --rounds 1 \\
        --tokens 1024 --prompt 200 --vocabulary 151936 --pulls 2 --json out.json

    python -m tests.gpu.rollout_overhead --shape qwen3-1.7b --slots 512 --samples 1000 --rounds 2 \\
        --tokens 8192 --mean 1039 --prompt 200 --vocabulary 151936 --warm 64 --round-s 240 \\
        --records --arg max-model-len=8448 --pulls 2 --json lognormal.json

`tests/bench/rollout_overhead.py` with a server on a GPU and cores to itself; answers have a fixed
length, for a GPU's sampling depends on who shares a batch, or with `--mean` lognormal ones, each
the same on both sides. Without `--shape`: the demo's model.
Versions are pulled by the channel `file`, so a pause holds the reading of one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlstreams.workers.engines.served.vllm import VllmAdapter
from rlstreams.workers.engines.served.wire import GenerateRequest
from tests.bench.rollout_overhead import add_options, measure, report
from tests.gpu.engine_contract import Bench
from tests.gpu.lognormal_agent import length_of
from tests.gpu.random_model import KINDS, write
from tests.servers.real import long_model, ready, without_end

CONTROL = ("pause", "set_label", "resume")


def wide_tokenizer(model: Path, vocabulary: int) -> None:
    """A word for each id: the demo's tokenizer knows 128, and an answer is made text."""
    words = {f"w{number}": number for number in range(vocabulary)}
    core = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "w3"},
    }  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(core))


def timed(times: dict[str, list[float]]) -> None:
    """Note how long each control call of the adapter takes."""
    for name in CONTROL:
        call = getattr(VllmAdapter, name)

        def wrapped(self: VllmAdapter, *args: object, name=name, call=call, **kwargs: object):  # type: ignore[no-untyped-def]
            async def run() -> None:
                started_s = time.perf_counter()
                await call(self, *args, **kwargs)
                times[name].append(round(time.perf_counter() - started_s, 4))

            return run()

        setattr(VllmAdapter, name, wrapped)


def lognormal(mean: int, longest: int) -> None:
    """Give each request a length of its own, by its seed, whoever makes it."""
    body = VllmAdapter.body

    def shortened(self: VllmAdapter, request: GenerateRequest) -> dict[str, Any]:
        most = length_of(request.seed, mean, longest)
        return body(self, replace(request, max_new_tokens=most))

    setattr(VllmAdapter, "body", shortened)  # noqa: B010


def main() -> None:
    """Start, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--mean", type=int, default=0, help="tokens; --tokens is the longest")
    parser.add_argument("--shape", default="", choices=["", *KINDS])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--log", default="engine.log")
    parser.set_defaults(kind="vllm", url="", experts=False, record="", fixed=True)
    args = parser.parse_args()
    if args.mean:
        lognormal(args.mean, args.tokens)
    args.arg.append(f"max-num-seqs={args.slots}")
    times: dict[str, list[float]] = {name: [] for name in CONTROL}
    timed(times)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.shape:
            args.model = str(folder / "model")
            write(args.shape, folder / "model")
            wide_tokenizer(folder / "model", args.vocabulary)
            without_end(folder / "model")
        else:
            args.model = str(without_end(long_model(folder / "served")))
        started_s = time.perf_counter()
        bench = Bench(args, folder)
        try:
            assert bench.process is not None
            asyncio.run(ready(bench.url, bench.process))
            print(f"ready after {time.perf_counter() - started_s:.0f} s", flush=True)  # noqa: T201
            more = {"mean_tokens": args.mean, "bare_records": args.records, "control_s": times}
            report(measure(bench.url, folder, args) | more, args.json)
        finally:
            print(times)  # noqa: T201
            bench.listener.close()
            if bench.process is not None:
                bench.process.end()


if __name__ == "__main__":
    main()
