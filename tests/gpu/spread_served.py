"""Weight pulls into a server that spreads a model over all GPUs: tensor and expert parallel.

    python -m tests.gpu.spread_served --engine vllm --out r.json -- --enable-expert-parallel
    python -m tests.gpu.spread_served --engine sglang --python ~/sgl --out r.json -- --ep-size 2
    python -m tests.gpu.spread_served --engine vllm --cpu --python .venv-vllm/bin/python -- ...

No GPU is left for the trainer, so it has the CPU and sends over gloo, or by a file. A server that
began with dummy weights pulls one version, another, and the first again, each way; a second server
read the first version from a model folder. Equal versions must give log-probs equal to the bit. A
step that fails is named in the result, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from rlstreams.workers.weights.link.mapping import each_expert
from rlstreams.workers.weights.report_listener import ReportListener, describe
from tests.gpu.model_folder import write_model
from tests.gpu.model_rows import SHAPES
from tests.gpu.model_server import PYTHON, SERVERS, Sglang, Vllm
from tests.gpu.served_transfer import IDS, STD, Trainer, announced, beside_a_request
from tests.gpu.weight_transfer import hardware

FIRST, OTHER = 1, 2
APART_S = 4.0  # two servers that start at once may choose the same free port for their ranks
# One key-value head for two ranks, and a vocabulary that is padded behind.
SHAPES["shared"] = replace(SHAPES["small"], kv_heads=1, vocabulary=4036)
# Two servers and perhaps others share each GPU: none may take what is left of its memory.
SHARING = {
    "vllm": ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**30)],
    "sglang": ["--mem-fraction-static", "0.2", "--max-total-tokens", "16384"],
}
SHOWN = ("embed_tokens", "layers.0.", "lm_head")


class LateError(Exception):
    """The whole measurement takes too long."""


class FileTrainer(Trainer):
    """Versions in a folder instead of a link; the content of a number is the same."""

    def __init__(self, other: Trainer, folder: Path) -> None:
        self.device, self.rows = other.device, other.rows
        self._backend = "file"
        self.server = FileWeightServer(folder, keep=2)  # type: ignore[assignment]
        self.channel = FileWeightChannel()  # type: ignore[assignment]
        self.listener = ReportListener()
        self.weights = {}

    def publish(self, version: int) -> Any:
        """By the content's own hash, which a reader of the file checks."""
        self.fill(version)
        manifest = self.server.publish(version, self.weights)
        return announced(manifest, self.server.endpoints()[0])


class Steps:
    """What was found, step by step; one that fails leaves its error."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.failed = told.setdefault("failed", {})

    def take(self, name: str, work: Callable[[], Any]) -> Any:
        """Do it and keep what it says; None if it failed."""
        started_s = time.monotonic()
        try:
            found = work()
        except LateError:
            raise
        except Exception as err:  # noqa: BLE001  (whatever a server does, the others are worth it)
            self.failed[name] = f"{type(err).__name__}: {err}"[:700]
            found = None
        else:
            self.told[name] = found
        sys.stderr.write(f"{name}: {time.monotonic() - started_s:.1f} s\n")
        return found


def start(
    args: argparse.Namespace, model: Path, folder: Path, load: str, port: int
) -> Vllm | Sglang:
    """A server over all ranks."""
    sharing = [] if args.cpu else SHARING[args.engine]
    server = SERVERS[args.engine](
        model,
        folder,
        port=port,
        gpu="" if args.cpu else ",".join(map(str, range(args.ranks))),
        python=args.python,
        ranks=args.ranks,
        arguments=["--load-format", load, *sharing, *args.arguments],
    )
    assert isinstance(server, Vllm | Sglang)
    return server


def held(trainer: Trainer, engine: Vllm | Sglang) -> list[dict[str, Any]]:
    """What each rank says that it holds."""
    with trainer.listener.open(describe(), kind="describe", ranks=engine.ranks) as pending:
        engine.pause()
        engine.update(pending.text)
        engine.resume()
        reports = pending.reports()
    found = []
    for report in reports:
        rows = report["parameters"]
        shapes = {name: shape for name, _, shape in rows if any(part in name for part in SHOWN)}
        found.append({"engine": report["engine"], "parameters": len(rows), "shapes": shapes})
    return found


def pulled(
    trainer: Trainer, engine: Vllm | Sglang, version: int, mode: str
) -> tuple[dict[str, Any], list[float]]:
    """One pull, and the log-probs after it."""
    return trainer.pull(engine, trainer.publish(version), mode), engine.logprobs(IDS)


def measure(
    steps: Steps, engine: Vllm | Sglang, by_link: Trainer, by_file: Trainer, *, is_cpu: bool
) -> None:
    """All pulls of the server with dummy weights."""
    in_place = "checkpoint" if is_cpu else "in_place"
    engine.__enter__()
    steps.take("prepared", lambda: engine.prepare() or engine.up_s)
    steps.take("ranks", lambda: held(by_link, engine))
    for name, trainer, version, mode in (
        ("first", by_link, FIRST, in_place),
        ("other", by_link, OTHER, in_place),
        ("first_again", by_link, FIRST, in_place),
        ("other_by_file", by_file, OTHER, in_place),
        ("first_by_file", by_file, FIRST, in_place),
        ("other_by_loader", by_link, OTHER, "checkpoint"),
        ("first_by_loader", by_link, FIRST, "checkpoint"),
        ("first_in_place_after_the_loader", by_link, FIRST, in_place),
    ):
        steps.take(name, lambda t=trainer, v=version, m=mode: pulled(t, engine, v, m))  # type: ignore[misc]
    if not is_cpu:
        steps.take("in_flight", lambda: beside_a_request(by_link, engine, OTHER, in_place))


def compared(told: dict[str, Any], fresh: list[float] | None) -> dict[str, Any]:
    """Log-probs of equal versions; None where one of a pair is not there."""
    rows = {}
    for name in list(told):
        if name.startswith(("first", "other")):
            told[name], rows[name] = told[name]
    firsts = {name: row for name, row in rows.items() if name.startswith("first")}
    if fresh is not None:
        firsts["fresh_server"] = fresh
    others = {name: row for name, row in rows.items() if name.startswith("other")}
    equal = {
        f"{name} == {base}": row == group[base]
        for group, base in ((firsts, "first"), (others, "other"))
        for name, row in group.items()
        if name != base and base in group
    }
    gaps = {
        name: max(abs(a - b) for a, b in zip(row, firsts["first"], strict=True))
        for name, row in firsts.items()
        if "first" in firsts
    }
    differ = rows.get("first") != rows.get("other")
    return {
        "all_equal": len(equal) == 7 and all(equal.values()),
        "versions_differ": differ,
        "equal": equal,
        "largest_gap_to_first": gaps,
        "first_three": {name: row[:3] for name, row in {**firsts, **others}.items()},
    }


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """The whole measurement ends by then, with what it has."""

    def late(*_: object) -> None:
        raise LateError(f"not through within {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGTERM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def run(args: argparse.Namespace, told: dict[str, Any], folder: Path) -> None:
    """Both servers, started at once, and what they say."""
    by_link = Trainer(args)
    by_file = FileTrainer(by_link, folder / "versions")
    told["num_bytes"] = by_link.fill(FIRST)
    model = write_model(folder / "model", SHAPES[args.model])
    whole = write_model(folder / "whole", SHAPES[args.model])
    loose = each_expert(by_link.weights.items())
    weights = {name: tensor.contiguous() for name, tensor in loose}
    save_file(weights, whole / "model.safetensors", {"format": "pt"})
    steps, fresh = Steps(told), None
    with contextlib.ExitStack() as stack:
        stack.callback(by_link.server.close)
        stack.callback(by_link.listener.close)
        stack.callback(by_file.listener.close)
        engine = start(args, model, folder, "dummy", args.port)
        stack.callback(engine.__exit__)
        if args.cpu:  # no room for two
            measure(steps, engine, by_link, by_file, is_cpu=True)
            engine.__exit__()
        else:
            time.sleep(APART_S)
        reader = start(args, whole, folder / "reader", "auto", args.port + 1)
        stack.callback(reader.__exit__)
        with ThreadPoolExecutor(1) as pool:
            up = pool.submit(reader.__enter__)
            if not args.cpu:
                measure(steps, engine, by_link, by_file, is_cpu=False)
            steps.take("fresh_up_s", lambda: up.result() and reader.up_s)
        fresh = steps.take("fresh", lambda: reader.logprobs(IDS))
        told["logprobs"] = compared(told, fresh)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(SERVERS), required=True)
    parser.add_argument("--cpu", action="store_true", help="vLLM for the CPU, by its loader only")
    parser.add_argument("--model", choices=sorted(SHAPES), default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=18841, help="and the next one")
    parser.add_argument("--python", default=PYTHON, help="the interpreter that has the server")
    parser.add_argument("--limit-s", type=int, default=400)
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="after --: more arguments of the server")
    return parser.parse_args(namespace=argparse.Namespace(backend="gloo", place="device"))


def main() -> int:
    """0 if all versions compare as they must."""
    args = parse()
    folder = Path(tempfile.mkdtemp())
    told: dict[str, Any] = {"hardware": hardware(), "torch": torch.__version__}
    told |= {"engine": args.engine, "model": args.model, "ranks": args.ranks}
    told |= {"arguments": args.arguments, "std": STD}
    try:
        with limited(args.limit_s):
            run(args, told, folder)
    except Exception as err:  # noqa: BLE001  (what was found until then is written down)
        told["error"] = f"{type(err).__name__}: {err}"[:1500]
    finally:
        text = json.dumps(told, indent=1)
        if args.out:
            args.out.write_text(text + "\n", encoding="utf-8")
            for log in folder.rglob("*.log"):
                shutil.copy(log, args.out.with_suffix(f".{log.name}"))
        told.pop("ranks", None)
        sys.stdout.write(json.dumps({k: v for k, v in told.items() if k != "fresh"}) + "\n")
    found = told.get("logprobs", {})
    is_well = found.get("all_equal") and found.get("versions_differ") and not told["failed"]
    sys.stdout.write(f"{'well' if is_well else 'NOT WELL'}: {found.get('equal')}\n")
    sys.stdout.write(f"failed: {list(told.get('failed', ()))} {told.get('error', '')[:300]}\n")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
