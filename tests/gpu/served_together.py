"""Weight pulls into several real servers at once, against a pull into one of them alone.

    python -m tests.gpu.served_together --engine vllm --servers 3 --out result.json
    python -m tests.gpu.served_together --engine vllm --backend gloo --model small --python P -- ...

The trainer has GPU 0, each server one of the next. All servers ask for a version before any is
served, and the weight server waits some milliseconds for all to be ready, so they should share one
broadcast: `receivers` tells how many each had. Log-probs must then be equal between all servers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlstreams.schemas.events import PolicyPublished, PullRequested
from rlstreams.workers.weights.collective import CollectiveWeightChannel
from rlstreams.workers.weights.report_listener import ReportListener
from tests.gpu.model_folder import write_model
from tests.gpu.model_rows import SHAPES
from tests.gpu.model_server import PYTHON, SERVERS, Sglang, Vllm
from tests.gpu.served_transfer import IDS, SECRET, Notes, Trainer, announced, asked
from tests.gpu.weight_transfer import hardware

PULL_S = 120.0


class Sent(Notes):
    """The weight server's log; it keeps to how many each broadcast went."""

    def __init__(self) -> None:
        self.receivers: list[int] = []

    def info(self, event: str, **fields: object) -> None:
        """Keep and show it."""
        super().info(event, **fields)
        if event == "weights_sent":
            self.receivers.append(int(str(fields["receivers"])))


class Puller:
    """One server with the channel and the listener of its worker."""

    def __init__(self, engine: Vllm | Sglang, backend: str, number: int) -> None:
        self.engine = engine
        self._worker = f"rollout-{number}"
        self._backend = backend
        self.channel = CollectiveWeightChannel(backend, SECRET)
        self.listener = ReportListener()

    def ask(self, version: int) -> PullRequested:
        """The request, as the worker would say it in the log."""
        request = asked(version, self._backend, self.channel.address())
        return replace(request, worker=self._worker, request_id=f"{self._worker}/{version}")

    def pull(self, published: PolicyPublished, mode: str) -> dict[str, float]:
        """One pull; seconds from the order on, and for which generation stood still."""
        order = self.channel.order(published, PULL_S, server=mode)
        with self.listener.open(
            order, kind="receive", mode=mode, ranks=self.engine.ranks
        ) as pending:
            started_s = time.monotonic()
            self.engine.pause()
            paused_s = time.monotonic()
            self.engine.update(pending.text)
            updated_s = time.monotonic()
            self.engine.resume()
            stop_s = time.monotonic() - started_s
            pending.reports()
        return {"order_s": updated_s - paused_s, "stop_s": stop_s}

    def close(self) -> None:
        """Release the listener's port."""
        self.listener.close()


def pulled(trainer: Trainer, pullers: list[Puller], version: int, mode: str) -> dict[str, Any]:
    """A new version into all of them; the slowest one's seconds, and all."""
    trainer.server.retire(0)
    trainer.fill(version)
    manifest = trainer.server.publish(version, trainer.weights, known_hash=f"{version:064x}")
    published = announced(manifest, trainer.server.endpoints()[0])
    for puller in pullers:
        trainer.server.serve(puller.ask(version))
    with ThreadPoolExecutor(len(pullers)) as pool:
        each = list(pool.map(lambda puller: puller.pull(published, mode), pullers))
    return {name: max(one[name] for one in each) for name in each[0]} | {"each": each}


def repeated(
    trainer: Trainer, pullers: list[Puller], repeats: int, first: int, mode: str
) -> dict[str, Any]:
    """The first pull, which forms the group, and the others."""
    each = [pulled(trainer, pullers, first + number, mode) for number in range(repeats + 1)]
    names = ("order_s", "stop_s")
    medians = {name: statistics.median(one[name] for one in each[1:]) for name in names}
    return medians | {"first": each[0], "pulls": each[1:]}


def measure(trainer: Trainer, pullers: list[Puller], repeats: int, mode: str) -> dict[str, Any]:
    """One of them while the others are not connected, then all."""
    alone = repeated(trainer, pullers[:1], repeats, 0, mode)
    together = repeated(trainer, pullers, repeats, repeats + 1, mode)
    logprobs = [puller.engine.logprobs(IDS) for puller in pullers]
    return {
        "alone": alone,
        "together": together,
        "together_of_alone": together["order_s"] / alone["order_s"],
        "logprobs_equal": all(one == logprobs[0] for one in logprobs),
        "first_three": logprobs[0][:3],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(SERVERS), required=True)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--model", choices=sorted(SHAPES), default="30b-a3b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--python", default=PYTHON, help="the interpreter that has the server")
    parser.add_argument("--port", type=int, default=18861, help="of the first server; then ten on")
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="after --: more arguments of the servers")
    return parser.parse_args(namespace=argparse.Namespace(place="device"))


def started(args: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> list[Any]:
    """All servers, side by side."""
    model = write_model(folder / "model", SHAPES[args.model])
    servers = [
        SERVERS[args.engine](
            model,
            folder / str(number),
            port=args.port + 10 * number,
            gpu=str(1 + number) if args.backend == "nccl" else "",
            python=args.python,
            backend="",
            arguments=args.arguments,
        )
        for number in range(args.servers)
    ]
    for server in servers:
        stack.push(server.__exit__)
    for server in servers:
        server.__enter__()
    return servers


def main() -> None:
    args = parse()
    folder = Path(tempfile.mkdtemp())
    result: dict[str, Any] = {"hardware": hardware(), "engine": args.engine, "model": args.model}
    result |= {"servers": args.servers, "backend": args.backend, "arguments": args.arguments}
    with contextlib.ExitStack() as stack:
        servers = started(args, folder, stack)
        sent = Sent()
        trainer = Trainer(args, sent)
        stack.callback(trainer.server.close)
        pullers = [Puller(server, args.backend, n) for n, server in enumerate(servers)]
        for puller in pullers:
            stack.callback(puller.close)
            puller.engine.prepare()
        mode = "in_place" if args.backend == "nccl" else "auto"
        try:
            result |= measure(trainer, pullers, args.repeats, mode)
        except Exception:
            sys.stderr.write("\n".join(server.tail() for server in servers))
            raise
        result["receivers"] = sent.receivers
        result["num_bytes"] = sum(tensor.nbytes for tensor in trainer.weights.values())
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
