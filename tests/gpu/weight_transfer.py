"""Weight pulls over NCCL (or gloo) against a plain broadcast of the same bytes, on one machine.

    python -m tests.gpu.weight_transfer --model 30b-a3b --pullers 1 --out result.json
    python -m tests.gpu.weight_transfer --backend gloo --model small --pullers 2   # no GPU needed

The trainer has GPU 0, each puller another one. Every pull is compared bit by bit with content that
the puller makes itself. Then a puller kills itself in the middle of a transfer, and another stops,
while the trainer's main thread multiplies matrices and is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import signal
import socket
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlstreams.schemas.events import PullRequested
from rlstreams.workers.weights.collective import CollectiveWeightServer
from rlstreams.workers.weights.link.handshake import receiver_key
from rlstreams.workers.weights.sender import SenderDeadlines
from tests.gpu.model_rows import SHAPES, server_rows, trainer_rows
from tests.gpu.puller import device_of, fill, make, run
from tests.gpu.yardstick import broadcast

SECRET = "of this measurement"
EPOCH = 1


@dataclass
class Notes:
    """The server's log, with times."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def info(self, event: str, **fields: object) -> None:
        """Keep it."""
        self.lines.append({"at_s": time.monotonic(), "event": event, **fields})

    warning = info


class Puller:
    """A puller process and the pipe to it."""

    def __init__(self, stand: Stand, index: int, gpu: int | None = None) -> None:
        """It has GPU `gpu`, or `index`."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.name = f"puller{index}"
        shape = SHAPES[stand.args.model]
        gpu = index if gpu is None else gpu
        arguments = (theirs, stand.args.backend, gpu, server_rows(shape), trainer_rows(shape))
        self.process = context.Process(target=run, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self._stand = stand

    def tell(self, order: dict[str, Any]) -> None:
        """Do this."""
        self._pipe.send(order)

    def pull(self, version: int, **more: Any) -> None:
        """Ask in the log, and pull."""
        request = PullRequested(
            worker=self.name,
            instance="-",
            role="rollout",
            request_id=f"{self.name}/{version}",
            policy_version=version,
            channel=self._stand.args.backend,
            address=self.name,
            requested_at_ms=0,
        )
        self._stand.server.serve(request)
        address = {
            "address": self._stand.server.endpoints()[0].address,
            "backend": self._stand.args.backend,
            "receiver": self.name,
            "key": receiver_key(SECRET, self.name),
            "epoch": EPOCH,
        }
        order = {"do": "pull", "address": address, "version": version, "deadline_s": 120.0}
        self.tell(order | {"verify": True} | more)

    def answer(self, timeout_s: float = 300.0) -> dict[str, Any]:
        """What it says; `died` if it did."""
        if not self._pipe.poll(timeout_s):
            return {"error": f"silent for {timeout_s:g} s"}
        try:
            answer: dict[str, Any] = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            return {"died": self.process.exitcode}
        return answer


class Stand:
    """A trainer: weights, a server, pullers, and a main thread that multiplies."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = device_of(args.backend, 0)
        self.rows = trainer_rows(SHAPES[args.model])
        self.weights = make(self.rows, self.device, 0)
        self.num_bytes = sum(t.numel() * t.element_size() for t in self.weights.values())
        self.notes = Notes()
        self.server = CollectiveWeightServer(
            args.backend,
            host="127.0.0.1",
            secret=SECRET,
            log=self.notes,
            limits=SenderDeadlines(window_s=0.02, form_s=30.0, stall_s=args.stall_deadline),
            place=args.place,
            device=self.device,
        )
        self.server.open(EPOCH)
        self.version = -1

    def publish(self) -> float:
        """The next version: other content under the same names. Seconds of the snapshot."""
        self.version += 1
        for name, tensor in self.weights.items():
            fill(tensor, self.version, name)
        self._synchronize()
        started_s = time.monotonic()
        self.server.retire(0)  # its memory takes the next one
        self.server.publish(self.version, self.weights, known_hash=f"{self.version:064x}")
        return time.monotonic() - started_s

    def step_s(self, num: int = 1) -> float:
        """Seconds of one pretended training step: a matrix product of fixed size."""
        size = 8192 if self.device.type == "cuda" else 512
        if not hasattr(self, "_factor"):
            self._factor = torch.randn(size, size, device=self.device, dtype=torch.bfloat16)
        self._synchronize()
        started_s = time.monotonic()
        for _ in range(num):
            self._factor @ self._factor
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return (time.monotonic() - started_s) / num

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


class Steps(threading.Thread):
    """Steps one after the other, timed, until told to stop."""

    def __init__(self, stand: Stand) -> None:
        super().__init__(daemon=True)
        self._stand = stand
        self._told = threading.Event()
        self.times: list[tuple[float, float]] = []  # started, seconds

    def run(self) -> None:
        if self._stand.device.type == "cuda":
            torch.cuda.set_device(self._stand.device)
        while not self._told.is_set():
            at_s = time.monotonic()
            self.times.append((at_s, self._stand.step_s(4)))

    def end(self) -> dict[str, float]:
        """Median, and the longest."""
        self._told.set()
        self.join()
        seconds = sorted(s for _, s in self.times)
        return {
            "steps": len(seconds),
            "median_ms": 1000 * statistics.median(seconds),
            "p99_ms": 1000 * seconds[int(0.99 * (len(seconds) - 1))],
            "max_ms": 1000 * seconds[-1],
        }


def measure_plain(stand: Stand, pullers: list[Puller], repeats: int) -> dict[str, Any]:
    """The yardstick, with the same processes on the same GPUs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"num_bytes": stand.num_bytes, "size": 1 + len(pullers), "port": port}
    common |= {"repeats": repeats}
    for rank, puller in enumerate(pullers, start=1):
        puller.tell({"do": "plain", "plain": common | {"rank": rank}})
    broadcast(device=stand.device, backend=stand.args.backend, rank=0, **common)
    each = [puller.answer()["seconds"] for puller in pullers]
    seconds = [max(times) for times in zip(*each, strict=True)]
    return speed(stand, seconds)


def measure_pulls(stand: Stand, pullers: list[Puller], repeats: int) -> dict[str, Any]:
    """All pullers pull each version at once."""
    snapshots, rounds = [], []
    stand.server.retire(0)
    forget_peak(stand.device)
    before = memory_gb(stand.device)
    for _ in range(repeats + 1):  # the first forms the group
        snapshots.append(stand.publish())
        for puller in pullers:
            puller.pull(stand.version)
        rounds.append([puller.answer() for puller in pullers])
    after = memory_gb(stand.device)
    wrong = [answer for answers in rounds for answer in answers if answer.get("wrong", ["?"])]
    later = [max(a["seconds"] for a in answers) for answers in rounds[1:] if not wrong]
    receiving = [max(a["receive_s"] for a in answers) for answers in rounds[1:] if not wrong]
    return speed(stand, later) | {
        "receiving_s": receiving,
        # The most at once beside the model; a snapshot taken before may have left its memory.
        "gb_beside_the_model": {place: after[place] - before[place] for place in after},
        "first_pull_s": [a.get("seconds") for a in rounds[0]],
        "first_join_s": [a.get("join_s") for a in rounds[0]],
        "first_snapshot_s": snapshots[0],
        "snapshot_s": statistics.median(snapshots[1:]),
        "bit_equal": not wrong,
        "wrong": wrong[:2],
    }


def memory_gb(device: torch.device) -> dict[str, float]:
    """In use by the trainer: on its GPU the most since `forget_peak`, and in this process."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    found = {"host": int(pages) * resource.getpagesize() / 1e9}
    if device.type == "cuda":
        found["device"] = torch.cuda.max_memory_allocated(device) / 1e9
    return found


def forget_peak(device: torch.device) -> None:
    """What was freed counts no longer."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def speed(stand: Stand, seconds: list[float]) -> dict[str, Any]:
    """Median of the repeats, as a speed too."""
    median_s = statistics.median(seconds) if seconds else float("nan")
    return {"median_s": median_s, "gb_per_s": stand.num_bytes / median_s / 1e9, "seconds": seconds}


def measure_loss(stand: Stand, pullers: list[Puller], number: int) -> dict[str, Any]:
    """The last puller gets signal `number` in the middle; the others must finish."""
    stand.publish()
    quiet = Steps(stand)
    quiet.start()
    time.sleep(0.5)
    before = quiet.end()
    stand.notes.lines.clear()
    steps = Steps(stand)
    steps.start()
    started_s = time.monotonic()
    victim = pullers[-1]
    middle = len(stand.rows) // 2
    victim.pull(stand.version, signal_at=(middle, number))
    for puller in pullers[:-1]:
        puller.pull(stand.version)
    answers = [puller.answer() for puller in pullers[:-1]]
    until_s = time.monotonic() + 30
    while not _named(stand, victim) and time.monotonic() < until_s:
        time.sleep(0.01)
    named_s = [line["at_s"] - started_s for line in _named(stand, victim)]
    victim.process.kill()
    return {
        "signal": signal.Signals(number).name,
        "others": answers,
        "named_after_s": named_s,
        "steps_before": before,
        "steps_during": steps.end(),
        "log": [line | {"at_s": line["at_s"] - started_s} for line in stand.notes.lines],
    }


def _named(stand: Stand, victim: Puller) -> list[dict[str, Any]]:
    return [
        line
        for line in list(stand.notes.lines)
        if line["event"] == "puller_lost" and victim.name in str(line["puller"])
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--model", choices=sorted(SHAPES), default="30b-a3b")
    parser.add_argument("--pullers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--place", choices=("auto", "device", "pinned"), default="device")
    parser.add_argument("--stall-deadline", type=float, default=10.0)
    parser.add_argument("--no-loss", action="store_true", help="kill nobody")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    stand = Stand(args)
    result: dict[str, Any] = {
        "hardware": hardware(),
        "torch": torch.__version__,
        "backend": args.backend,
        "model": args.model,
        "num_bytes": stand.num_bytes,
        "pullers": args.pullers,
        "place": args.place,
    }
    pullers = [Puller(stand, index) for index in range(1, args.pullers + 1)]
    for puller in pullers:
        puller.answer()
    result["plain"] = measure_plain(stand, pullers, args.repeats)
    result["pull"] = measure_pulls(stand, pullers, args.repeats)
    if args.pullers > 1:
        result["one_of_them"] = measure_pulls(stand, pullers[:1], args.repeats)
    result["ratio"] = result["pull"]["median_s"] / result["plain"]["median_s"]
    if not args.no_loss:
        result["killed"] = measure_loss(stand, pullers, signal.SIGKILL)
        pullers[-1] = Puller(stand, args.pullers)
        pullers[-1].answer()
        result["after_kill"] = measure_pulls(stand, pullers, 1)
        result["stopped"] = measure_loss(stand, pullers, signal.SIGSTOP)
    for puller in pullers:
        puller.process.kill()
    stand.server.close()
    text = json.dumps(result, indent=1, default=str)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


def hardware() -> str:
    """The GPUs, for the result."""
    if not torch.cuda.is_available():
        return "CPU"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


if __name__ == "__main__":
    main()
