"""Weight pulls into a real vLLM or SGLang server: time, pause, and the log-probs afterwards.

    python -m tests.gpu.served_transfer --engine vllm --out result.json
    python -m tests.gpu.served_transfer --engine vllm --backend gloo --model small --python PYTHON

The trainer has GPU 0, the server GPU 1. Log-probs after an update in place are compared bit by bit
with those after the same version went through the server's own loader.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rlstreams.schemas.events import Endpoint, PolicyPublished, PullRequested
from rlstreams.workers.weights.channel import WeightManifest
from rlstreams.workers.weights.collective import CollectiveWeightChannel, CollectiveWeightServer
from rlstreams.workers.weights.report_listener import ReportListener, describe
from rlstreams.workers.weights.sender import SenderDeadlines
from tests.gpu.model_folder import write_model
from tests.gpu.model_rows import SHAPES, trainer_rows
from tests.gpu.model_server import PYTHON, SERVERS, Sglang, Vllm
from tests.gpu.puller import device_of, make

SECRET = "of this measurement"
IDS = [5, 17, 101, 33, 2000, 7, 1234, 64, 9, 512, 77, 3, 2048, 90, 11, 4000]
STD = 0.02


class Notes:
    """The server's log."""

    def info(self, event: str, **fields: object) -> None:
        """Show it."""
        sys.stderr.write(f"{event} {fields}\n")

    warning = info


class Trainer:
    """Weights, a weight server, and a worker's channel and listener."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = device_of(args.backend, 0)
        self.rows = trainer_rows(SHAPES[args.model])
        self._backend = args.backend
        self.server = CollectiveWeightServer(
            args.backend,
            host="127.0.0.1",
            secret=SECRET,
            log=Notes(),
            limits=SenderDeadlines(stall_s=20.0),
            place=args.place,
            device=self.device,
        )
        self.server.open(1)
        self.channel = CollectiveWeightChannel(args.backend, SECRET)
        self.listener = ReportListener()
        self.weights: dict[str, torch.Tensor] = {}

    def publish(self, version: int) -> PolicyPublished:
        """New content, served under a new number."""
        self.server.retire(0)
        self.fill(version)
        manifest = self.server.publish(version, self.weights, known_hash=f"{version:064x}")
        return announced(manifest, self.server.endpoints()[0])

    def fill(self, version: int) -> int:
        """The content of a number, whose old tensors go first; bytes."""
        self.weights = {}
        self.weights = make(self.rows, self.device, version)
        for tensor in self.weights.values():
            tensor.mul_(STD)
        return sum(tensor.nbytes for tensor in self.weights.values())

    def pull(
        self, engine: Vllm | Sglang, published: PolicyPublished, mode: str = "in_place"
    ) -> dict[str, Any]:
        """One pull, as an adapter does it."""
        version = published.policy_version
        self.server.serve(asked(version, self._backend, self.channel.address()))
        order = self.channel.order(published, 120.0, server=mode)
        with self.listener.open(order, kind="receive", mode=mode, ranks=engine.ranks) as pending:
            started_s = time.monotonic()
            engine.pause()
            paused_s = time.monotonic()
            engine.update(pending.text)
            updated_s = time.monotonic()
            engine.resume()
            resumed_s = time.monotonic()
            reports = pending.reports()
        report = max(reports, key=lambda report: float(report["seconds"]))
        return {
            "order_s": updated_s - paused_s,
            "stop_s": resumed_s - started_s,
            "in_server_s": report["seconds"],
            "receive_s": report["receive_s"],
            "join_s": report["join_s"],
            "num_bytes": sum(report["num_bytes"] for report in reports),
        }


def announced(manifest: WeightManifest, endpoint: Endpoint) -> PolicyPublished:
    """As the trainer would say it in the log."""
    return PolicyPublished(
        model="m",
        policy_version=manifest.policy_version,
        weight_hash=manifest.weight_hash,
        epoch=1,
        instance="-",
        step=manifest.policy_version,
        num_bytes=manifest.num_bytes,
        layout=manifest.layout,
        endpoints=(endpoint,),
        versions_served=(manifest.policy_version,),
        published_at_ms=0,
    )


def asked(version: int, channel: str, address: str) -> PullRequested:
    """As the worker would say it in the log."""
    return PullRequested(
        worker="rollout-0",
        instance="-",
        role="rollout",
        request_id=str(version),
        policy_version=version,
        channel=channel,
        address=address,
        requested_at_ms=0,
    )


def measure(trainer: Trainer, engine: Vllm | Sglang, repeats: int, in_place: str) -> dict[str, Any]:
    """First pull, pulls, a pull beside a running request, and the same version by the loader."""
    engine.prepare()
    with trainer.listener.open(describe(60.0), kind="describe", ranks=engine.ranks) as pending:
        engine.pause()
        engine.update(pending.text)
        engine.resume()
        described = pending.reports()[0]
    result: dict[str, Any] = {"engine": described["engine"], "up_s": engine.up_s}
    result["parameters"] = len(described["parameters"])
    result["first"] = trainer.pull(engine, trainer.publish(0), in_place)
    pulls = [trainer.pull(engine, trainer.publish(v), in_place) for v in range(1, repeats + 1)]
    result["pulls"] = pulls
    for name in ("order_s", "stop_s", "in_server_s", "receive_s"):
        result[f"median_{name}"] = statistics.median(pull[name] for pull in pulls)
    result["in_flight"] = beside_a_request(trainer, engine, repeats + 1, in_place)
    published = trainer.publish(repeats + 2)
    trainer.pull(engine, published, in_place)
    placed = engine.logprobs(IDS)
    result["checkpoint"] = trainer.pull(engine, published, "checkpoint")
    loaded = engine.logprobs(IDS)
    trainer.pull(engine, trainer.publish(repeats + 3), in_place)
    other = engine.logprobs(IDS)
    result["logprobs"] = {
        "bit_equal_to_checkpoint": placed == loaded,
        "max_difference": max(abs(a - b) for a, b in zip(placed, loaded, strict=True)),
        "another_version_differs": placed != other,
        "first_three": placed[:3],
    }
    return result


def beside_a_request(
    trainer: Trainer, engine: Vllm | Sglang, version: int, in_place: str
) -> dict[str, Any]:
    """A long request must go on."""
    published = trainer.publish(version)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(engine.long_request)
        time.sleep(1.0)
        was_running = not request.done()
        pulled = trainer.pull(engine, published, in_place)
        tokens, reason = request.result(120)
    return pulled | {"was_running": was_running, "tokens": tokens, "finish_reason": reason}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(SERVERS), required=True)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--model", choices=sorted(SHAPES), default="30b-a3b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--place", choices=["auto", "device", "pinned"], default="device")
    parser.add_argument("--python", default=PYTHON, help="the interpreter that has the server")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel size, from GPU 1 on")
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="after --: more arguments of the server")
    return parser.parse_args()


def main() -> None:
    args = parse()
    folder = Path(tempfile.mkdtemp())
    model = write_model(folder / "model", SHAPES[args.model])
    is_gpu = args.backend == "nccl"
    hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if is_gpu else "CPU"
    result: dict[str, Any] = {"hardware": hardware, "torch": torch.__version__}
    result |= {"model": args.model, "backend": args.backend, "place": args.place}
    result |= {"ranks": args.ranks, "arguments": args.arguments}
    with SERVERS[args.engine](
        model,
        folder,
        port=18801,
        gpu=",".join(map(str, range(1, 1 + args.ranks))) if is_gpu else "",
        python=args.python,
        ranks=args.ranks,
        arguments=args.arguments,
    ) as engine:
        trainer = Trainer(args)
        try:
            in_place = "in_place" if is_gpu else "auto"
            result |= measure(trainer, engine, args.repeats, in_place)
        except Exception:
            sys.stderr.write(engine.tail())
            raise
        finally:
            trainer.server.close()
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
