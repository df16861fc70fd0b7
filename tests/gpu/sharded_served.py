"""Weight pulls from a model that FSDP2 has spread over two GPUs, into a vLLM or SGLang server.

    python -m tests.gpu.sharded_served --engine vllm --out result.json
    python -m tests.gpu.sharded_served --engine vllm --backend gloo --model small --python P -- ...

With four GPUs the server has the last two (TP 2). With two it shares GPU 1 with the trainer's rank
1, in a group of its own, which NCCL permits; the two processes then take turns on that GPU, so with
place `none`, where rank 1 gathers while the server receives, the times say little. Log-probs after
a pull in place are compared bit by bit with those after the same version by the server's loader.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rlstreams.workers.weights.collective import CollectiveWeightChannel
from rlstreams.workers.weights.report_listener import ReportListener
from tests.gpu.model_folder import write_model
from tests.gpu.model_rows import SHAPES, trainer_rows
from tests.gpu.model_server import PYTHON, SERVERS, Sglang, Vllm
from tests.gpu.puller import device_of
from tests.gpu.served_transfer import IDS, Trainer, announced
from tests.gpu.sharded_stand import PLACES, ShardedStand
from tests.gpu.weight_transfer import SECRET, Puller, hardware, measure_plain

RANKS = 2


class ShardedTrainer(Trainer):
    """Rank 0's weight server, with a worker's channel and listener."""

    def __init__(self, stand: ShardedStand) -> None:
        self._stand = stand
        self._backend = stand.args.backend
        self.server = stand.server
        self.channel = CollectiveWeightChannel(self._backend, SECRET)
        self.listener = ReportListener()

    def version(self, work: Any) -> tuple[float, Any]:
        """A new version, served while `work` uses it; seconds to publish, and its answer."""
        stand = self._stand
        stand.fill()
        stand.tell(do="follow")
        with stand.weights:
            started_s = time.monotonic()
            stand.server.retire(0)
            known = f"{stand.version:064x}"
            manifest = stand.server.publish(stand.version, stand.weights, known_hash=known)
            seconds = time.monotonic() - started_s
            answer = work(announced(manifest, stand.server.endpoints()[0]))
            stand.server.before_change()
        return seconds, answer


def server_gpus(args: argparse.Namespace) -> list[int]:
    """Two of its own where there are four, else the one of the trainer's last rank."""
    if args.backend == "gloo":
        return []
    return [2, 3] if torch.cuda.device_count() >= 2 * RANKS else [1]


def yardstick(args: argparse.Namespace) -> dict[str, Any]:
    """A plain broadcast of as many bytes from GPU 0 to the server's first."""
    num_bytes = sum(2 * math.prod(shape) for _, _, shape in trainer_rows(SHAPES[args.model]))
    stand = SimpleNamespace(args=args, device=device_of(args.backend, 0), num_bytes=num_bytes)
    puller = Puller(stand, 1, (server_gpus(args) or [0])[0])
    puller.answer()
    plain = measure_plain(stand, [puller], args.repeats)
    puller.process.kill()
    puller.process.join()
    if args.backend == "nccl":
        torch.cuda.empty_cache()
    return plain


def measure(stand: ShardedStand, engine: Vllm | Sglang, place: str, repeats: int) -> dict[str, Any]:
    """Pulls, and the last version once more by the loader."""
    stand.serve_from(place)
    trainer = ShardedTrainer(stand)
    mode = "auto" if stand.args.backend == "gloo" else "in_place"
    pulls, snapshots = [], []
    for _ in range(repeats + 1):  # the first forms the group
        seconds, pulled = trainer.version(lambda event: trainer.pull(engine, event, mode))
        pulls.append(pulled)
        snapshots.append(seconds)

    def both_ways(event: Any) -> tuple[list[float], list[float]]:
        trainer.pull(engine, event, mode)
        placed = engine.logprobs(IDS)
        trainer.pull(engine, event, "checkpoint")
        return placed, engine.logprobs(IDS)

    _, (placed, loaded) = trainer.version(both_ways)
    stand.server.close()
    trainer.listener.close()
    median_s = statistics.median(pull["order_s"] for pull in pulls[1:])
    return {
        "median_order_s": median_s,
        "median_receive_s": statistics.median(pull["receive_s"] for pull in pulls[1:]),
        "median_stop_s": statistics.median(pull["stop_s"] for pull in pulls[1:]),
        "first": pulls[0],
        "publish_s": statistics.median(snapshots[1:]),
        "gb_per_s": stand.num_bytes / median_s / 1e9,
        "bit_equal_to_checkpoint": placed == loaded,
        "max_difference": max(abs(a - b) for a, b in zip(placed, loaded, strict=True)),
        "first_three": placed[:3],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(SERVERS), required=True)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--model", choices=sorted(SHAPES), default="30b-a3b-16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=["device", "none"])
    parser.add_argument("--python", default=PYTHON, help="the interpreter that has the server")
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="after --: more arguments of the server")
    return parser.parse_args(namespace=argparse.Namespace(ranks=RANKS, pullers=1))


def main() -> None:
    args = parse()
    # NCCL reads it once a process, and the trainer's ranks use NCCL before our group does: it must
    # be as model servers have it.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    gpus = server_gpus(args)
    folder = Path(tempfile.mkdtemp())
    result: dict[str, Any] = {"hardware": hardware(), "torch": torch.__version__}
    result |= {"engine": args.engine, "model": args.model, "trainer_ranks": RANKS}
    result |= {"server_gpus": gpus, "plain": yardstick(args), "places": {}}
    # The server first: it looks at what memory is free when it starts.
    with SERVERS[args.engine](
        write_model(folder / "model", SHAPES[args.model]),
        folder,
        port=18831,
        gpu=",".join(map(str, gpus)),
        python=args.python,
        backend="",
        ranks=max(1, len(gpus)),
        arguments=args.arguments,
    ) as engine:
        assert isinstance(engine, Vllm | Sglang)
        engine.prepare()
        stand = ShardedStand(args)
        result["num_bytes"] = stand.num_bytes
        try:
            for place in args.places:
                told = measure(stand, engine, place, args.repeats)
                told["of_plain"] = told["median_order_s"] / result["plain"]["median_s"]
                result["places"][place] = told
                if args.out:
                    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except Exception:
            sys.stderr.write(engine.tail())
            raise
        stand.tell(do="end")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
