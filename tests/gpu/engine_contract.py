"""The adapters against a real GPU server: start it, check it, exercise it, record it.

    python -m tests.gpu.engine_contract vllm --python PYTHON --model FOLDER --json out.json
    python -m tests.gpu.engine_contract sglang --python PYTHON --model FOLDER --record out.jsonl

Starts a server by the command that a rollout worker would use, dummy-loaded, with the transfer
plugin; `--url` takes a running one instead. Then: `doctor --server`, two versions pulled by the
channel `file`, greedy and random answers, a long answer under each way of changing weights, and
log-probs against Hugging Face on the same machine. `--record` writes the exchanges for
`Replay` instead (tests/contract/recordings/KIND-VERSION.jsonl; use a small model); weights then
travel by folder, as a replay has no plugin. Every file there is replayed by
tests/contract/test_recorded.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.streams.broker.ports import free_ports
from rlstreams.workers.bootstrap.model_server import command_of, where_installed
from rlstreams.workers.compute.score import scorer_of
from rlstreams.workers.config.load import load
from rlstreams.workers.engines.base import PauseMode, TokenSequence
from rlstreams.workers.engines.served.check import check_server
from rlstreams.workers.engines.served.delivery import FolderDelivery
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.engines.served.plugin_delivery import PluginDelivery
from rlstreams.workers.engines.served.server_client import ServerClient
from rlstreams.workers.engines.served.shape import longest_sequence, read_shape
from rlstreams.workers.model.model import load_model, weights_of
from rlstreams.workers.server.process import ServerProcess
from rlstreams.workers.weights import server_plugin
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from rlstreams.workers.weights.report_listener import ReportListener
from tests.contract.engine_rigs import announced, collect, request
from tests.servers.recorded import Recorder
from tests.servers.replayed import head_of
from tests.servers.scenario import PROMPTS, exercise
from tests.servers.served import settings

START_S = 500.0


class Bench:
    """A server, its model, and versions of it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.kind, self.model, self.folder = Kind(args.kind), Path(args.model).resolve(), folder
        self.weights = FileWeightServer(folder / "weights", keep=4)
        self.listener = ReportListener()
        self.process: ServerProcess | None = None
        self.url = args.url or self._start(args)

    def _start(self, args: argparse.Namespace) -> str:
        words = [
            f"engine.python={args.python}",
            f"model.path={self.model}",
            "engine.log_level=info",
        ]
        words += [f"rollout.engine={self.kind}", *(f"engine.args.{pair}" for pair in args.arg)]
        words += [f"engine.env.{pair}" for pair in args.env]
        words += [f"rollout.capture_experts={str(args.experts).lower()}"]
        if args.record:
            words.append("engine.load=auto")  # a folder is loaded by the loader of the start
        config, (port,) = load([], words), free_ports(1)
        url = f"http://127.0.0.1:{port}"
        where = where_installed(config, self.kind)
        environment = server_plugin.environment(self.folder / "plugin")
        command = command_of(config, self.kind, where, url, environment)
        print(command.shell())  # noqa: T201
        self.process = ServerProcess(command, Path(args.log))
        self.process.start()
        return url

    def engine(self, args: argparse.Namespace, url: str, **changes: Any) -> ServedEngine:
        limits = {"pull_s": 120.0, "request_s": 300.0, "start_s": START_S, "silent_s": 120.0}
        chosen = settings(self.kind, capture_experts=args.experts, **{**limits, **changes})
        shape = read_shape(self.model)
        delivery = PluginDelivery(self.listener, self.model, self.folder / "versions-0", "0")
        if args.record:
            delivery = FolderDelivery(self.model, self.folder / "versions")
        server = ServerClient(url, chosen, shape, delivery)
        return ServedEngine(chosen, shape, longest_sequence(self.model), [server])

    def publish(self, version: int) -> Any:
        generator = torch.Generator().manual_seed(version)
        base = weights_of(load_model(self.model, "bfloat16"))
        changed = {
            name: tensor + (0.002 * version * torch.randn(tensor.shape, generator=generator)).to(
                tensor.dtype
            )
            for name, tensor in base.items()
        }  # fmt: skip
        return announced(self.weights, self.weights.publish(version, changed))


async def under_each_mode(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A long answer while weights change."""
    rows, channel = [], FileWeightChannel()
    for mode in PauseMode:
        engine = bench.engine(args, bench.url, on_pull=mode)
        await engine.start()
        await engine.pull(bench.publish(0), channel)
        long = request("0/0/0", temperature=1.0, max_new_tokens=args.long)
        running = asyncio.create_task(collect(engine, long))
        await asyncio.sleep(args.before_s)
        pulled = await engine.pull(bench.publish(1), channel)
        segments = await running
        spans = [(s.policy_version, len(s.token_ids), str(s.finish_reason)) for s in segments]
        rows.append({"mode": mode, "spans": spans, "seconds": pulled.seconds,
                     "paused_s": pulled.paused_s, "bytes": pulled.num_bytes})  # fmt: skip
        await engine.close()
    return rows


async def logprob_gap(bench: Bench, args: argparse.Namespace) -> dict[str, float]:
    """Sampled log-probs against Hugging Face in float32 with the same (bfloat16) weights."""
    engine, channel, published = bench.engine(args, bench.url), FileWeightChannel(), []
    await engine.start()
    published = bench.publish(1)
    await engine.pull(published, channel)
    wanted = [request(f"{n}/0/0", token_ids=np.array(ids, np.int32), max_new_tokens=32)
              for n, ids in enumerate(PROMPTS)]  # fmt: skip
    answers = [await collect(engine, one) for one in wanted]
    await engine.close()
    scorer = scorer_of(bench.model)
    published32 = {n: t.float() for n, t in dict(channel.pull(published, 60.0)).items()}
    event = announced(bench.weights, bench.weights.publish(9, published32))
    scorer.pull(event, channel)
    gaps = [
        np.abs(answer[0].logprobs - scores.logprobs[len(one.token_ids) :])
        for one, answer in zip(wanted, answers, strict=True)
        for scores in scorer.score(
            [TokenSequence(token_ids=np.concatenate([one.token_ids, answer[0].token_ids]))], 9, 1.0
        )
    ]
    flat = np.concatenate(gaps)
    return {"max": float(flat.max()), "mean": float(flat.mean())}


async def run(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Everything, in order; nothing is asked before the server is ready."""
    started_s = time.monotonic()
    engine = bench.engine(args, bench.url)
    await engine.start()
    versions = (bench.publish(0), bench.publish(1))
    await engine.pull(versions[0], FileWeightChannel())
    told: dict[str, Any] = {"ready_s": time.monotonic() - started_s, "server": engine.name}
    await engine.close()
    if args.record:
        head = head_of(engine.name, bench.model, args.experts, versions)
        hidden = {str(bench.model): "<model>", str(bench.folder): "<folder>", str(Path.home()): "~"}
        recorder = Recorder(bench.url, Path(args.record), head, hidden)
        recorded = bench.engine(args, recorder.url)
        await recorded.start()
        told["seen"] = await exercise(recorded, versions, FileWeightChannel())
        recorder.finish(told["seen"])
        await recorded.close()
        recorder.close()
        return told
    told["check"] = [str(f) for f in await check_server(bench.url)]
    again = bench.engine(args, bench.url)
    await again.start()
    told["seen"] = await exercise(again, versions, FileWeightChannel())
    await again.close()
    told["modes"] = await under_each_mode(bench, args)
    told["logprob_gap"] = await logprob_gap(bench, args)
    return told


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=[str(kind) for kind in Kind])
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--python", default="", help="of the server's environment")
    parser.add_argument("--url", default="", help="of a running server, instead")
    parser.add_argument("--arg", action="append", default=[], help="NAME=VALUE for the server")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for the server")
    parser.add_argument("--experts", action="store_true", help="ask for routed experts")
    parser.add_argument("--long", type=int, default=1500, help="tokens of a long answer")
    parser.add_argument("--before-s", type=float, default=1.0, help="seconds until it is disturbed")
    parser.add_argument("--record", default="", help="file for the exchanges")
    parser.add_argument("--log", default="engine.log", help="of the server")
    parser.add_argument("--json", default="")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        try:
            told = asyncio.run(run(bench, args))
        finally:
            bench.listener.close()
            if bench.process is not None:
                bench.process.end()
    print(json.dumps(told, indent=2))  # noqa: T201
    if args.json:
        Path(args.json).write_text(json.dumps(told, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
