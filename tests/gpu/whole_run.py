"""A whole run on two GPUs of one machine: broker, prompts, server, log-probs, trainer, NCCL pulls.

    python -m tests.gpu.whole_run --out result.json
    python -m tests.gpu.whole_run --engine sglang --python ~/sgl --out result.json
    python -m tests.gpu.whole_run --model dense --steps 12 --out result.json  # 1.4 billion
    python -m tests.gpu.whole_run --cpu --steps 3 --python .venv-vllm/bin/python   # vLLM and gloo

Runs `rlstreams up` on the demo with its overlay, as a user would, and then reads the run's own log:
what was learned, what each pull cost, whether every sample is accounted for. The trainer has GPU 0;
the server and the log-prob worker share GPU 1. Words behind `--` are overrides
(`--trainer.device=cpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlstreams.cli.named import opened_run
from rlstreams.schemas.events import PolicyLoaded
from rlstreams.show.report.collect import collect
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import POLICY_PULLS
from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from tests.gpu.random_model import KINDS

EXAMPLES = Path(__file__).resolve().parents[2] / "infra" / "examples"
ON_CPU = ("weights.channel=gloo", "prompts.evaluate_rows=32", "engine.args.enforce-eager=true")
OVERLAYS = {"vllm": "demo-gpu.toml", "sglang": "demo-sglang.toml"}
LARGE = Path(__file__).resolve().parent / "large.toml"
READ_S = 60.0
DRAIN_S = 60.0
WRITE_S = 240.0
TAIL_LINES = 40


def overrides_of(args: argparse.Namespace) -> list[str]:
    """What is asked of the run, on top of the files."""
    words = [f"run.dir={args.folder}/{{id}}", f"trainer.steps={args.steps}"]
    words += [f"broker.jars_dir={args.jars}"] if args.jars else []
    words += [f"engine.python={args.python}"] if args.python else []
    if args.model:
        words += [f"model.path={model_of(args)}", f"run.id={args.engine}-{args.model}"]
    words += ON_CPU if args.cpu else ()
    return [*words, *(word.removeprefix("--") for word in args.overrides)]


def files_of(args: argparse.Namespace) -> list[Path]:
    """The example, what it is to run on, and what a large model needs."""
    overlay = "demo-vllm.toml" if args.cpu else OVERLAYS[args.engine]
    return [EXAMPLES / args.example, EXAMPLES / overlay, *([LARGE] if args.model else [])]


def model_of(args: argparse.Namespace) -> Path:
    """The folder of a random model."""
    return Path(args.folder).resolve() / f"model-{args.model}"


def run_it(
    files: Sequence[Path],
    overrides: Sequence[str],
    folder: Path,
    limit_s: float,
    command: Sequence[str] = ("rlstreams", "up"),
    enough: threading.Event | None = None,
) -> int:
    """`rlstreams up`, or another program; its status. What it says is shown and kept.

    Args:
        limit_s: then it is interrupted, drains and sums up; the status is 124.
        enough: the same, once this is set; the status is its own.
    """
    words = [*command, *map(str, files), *(f"--{word}" for word in overrides)]
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    program = [sys.executable, "-m", *words]
    return ended(program, folder / "up.log", limit_s, environment, enough=enough)


def ended(
    words: Sequence[str],
    log: Path,
    limit_s: float,
    environment: dict[str, str],
    mode: str = "w",
    enough: threading.Event | None = None,
) -> int:
    """A program's status; 124: at its limit it was interrupted, as by Ctrl-C.

    Args:
        log: file of its output.
        mode: "a" where the log of an earlier start is to stay.
        enough: once set, it is interrupted as well; the status is its own.
    """
    if mode == "w":
        log.unlink(missing_ok=True)
    # With this process goes all that the program started, servers on GPUs included.
    child = Child.started(words, log=log, environment=environment, orphaned=Orphaned.DIES)
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s and not (enough and enough.is_set()):
        if child.wait(1.0):
            return child.poll() or 0
    child.signal(signal.SIGINT)
    child.wait(DRAIN_S)
    child.kill()
    child.wait(DRAIN_S)
    return child.poll() or 0 if enough and enough.is_set() else 124


def loaded_events(bus: Bus) -> Iterator[PolicyLoaded]:
    """What workers said of their pulls."""
    partition = Partition(POLICY_PULLS.name, 0)
    end = bus.ends(POLICY_PULLS.name)[partition]
    until_s = time.monotonic() + READ_S
    with bus.reader({partition: bus.beginnings(POLICY_PULLS.name)[partition]}) as reader:
        while reader.positions()[partition] < end:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{partition} was not read within {READ_S:g} s")
            for record in reader.poll(500, 0.2):
                event = decoded(record).event
                if isinstance(event, PolicyLoaded):
                    yield event


def pulls_by_role(events: Sequence[PolicyLoaded]) -> dict[str, Any]:
    """Each role's pulls; the first one of a worker forms the group, and is told apart."""
    told: dict[str, Any] = {}
    for role in sorted({event.role for event in events}):
        own = [event for event in events if event.role == role]
        later = own[1:] or own
        told[role] = {
            "pulls": len(own),
            "channel": own[0].channel,
            "num_bytes": own[0].num_bytes,
            "first_s": own[0].seconds,
            "median_s": statistics.median(event.seconds for event in later),
            "max_s": max(event.seconds for event in later),
            "median_paused_s": statistics.median(event.paused_s for event in later),
            "gb_per_s": own[0].num_bytes / statistics.median(e.seconds for e in later) / 1e9,
            "each": [[e.policy_version, e.seconds, e.paused_s] for e in own],
        }
    return told


def told_by_the_log(config: RunConfig) -> dict[str, Any]:
    """All figures, from topics alone."""
    with opened_run(config) as log:
        given = collect(log, config.run.id)
        pulls = pulls_by_role(list(loaded_events(log.bus)))
    views = given.fold.state
    steps, throughput = views.run.steps, views.throughput
    seconds = (steps[-1].finished_at_ms - steps[0].finished_at_ms) / 1000 if steps else 0.0
    training_s = sum(p.metrics["train_s"] for p in steps[1:])
    between_s = [(b.finished_at_ms - a.finished_at_ms) / 1000 for a, b in pairwise(steps)]
    mismatch = [p.metrics["mismatch_mean"] for p in steps if "mismatch_mean" in p.metrics]
    return {
        "accuracy": [[p.policy_version, p.accuracy, p.num_samples]
                     for p in views.evaluation.curve],
        "steps": len(steps),
        "reward": [point.reward for point in steps],
        "epochs": [point.epoch for point in steps],
        "step_ends_s": [point.finished_at_ms / 1000 for point in steps],
        "seconds_of_steps": seconds,
        "tokens_per_s": sum(point.num_tokens for point in steps[1:]) / seconds if seconds else 0.0,
        "step_s": statistics.median(between_s) if between_s else None,
        "not_training_share": 1 - training_s / seconds if seconds else None,
        "states_s": {role: dict(throughput.seconds(role)) for role in throughput.roles},
        "train_s": statistics.median(p.metrics["train_s"] for p in steps) if steps else None,
        "mismatch_mean": statistics.median(mismatch) if mismatch else None,
        "pulls": pulls,
        "audit_ok": given.audit.ok,
        "audit": json.loads(given.audit.to_json()),
    }  # fmt: skip


def tails(folder: Path) -> str:
    """The last lines of each log of the run."""
    texts = []
    for log in sorted(folder.rglob("*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        texts.append("\n".join([f"==> {log}", *lines]))
    return "\n".join(texts)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="vLLM for the CPU, and gloo")
    parser.add_argument("--engine", choices=sorted(OVERLAYS), default="vllm")
    parser.add_argument(
        "--example", default="demo.toml", help="in infra/examples, under the overlay"
    )
    parser.add_argument("--model", choices=["", *KINDS], default="", help="random; empty: the demo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="runs/gpu", help="for the run's files")
    parser.add_argument("--jars", default="", help="folder of the broker's jars")
    parser.add_argument("--python", default="", help="of the server's environment")
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="after --: fields of the configuration")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and report; the run's status."""
    args = parse(argv)
    files, overrides = files_of(args), overrides_of(args)
    result: dict[str, Any] = {"hardware": hardware(), "engine": args.engine, "model": args.model}
    if args.model:
        write_it = [sys.executable, "-m", "tests.gpu.random_model", args.model, str(model_of(args))]
        subprocess.run(write_it, check=True, timeout=WRITE_S)
    config = load(files, overrides)
    folder = Path(config.folder)
    started_s = time.monotonic()
    status = run_it(files, overrides, folder, args.limit_s)
    result |= {"status": status, "wall_s": time.monotonic() - started_s, "overrides": overrides}
    sys.stdout.write((folder / "up.log").read_text(encoding="utf-8", errors="replace")[-3000:])
    try:
        result |= told_by_the_log(config)
    finally:
        text = json.dumps(result, indent=1)
        if args.out:
            args.out.write_text(text + "\n", encoding="utf-8")
        shown = {k: v for k, v in result.items() if k not in ("reward", "audit", "pulls")}
        pulls = {role: {k: v for k, v in told.items() if k != "each"}
                 for role, told in result.get("pulls", {}).items()}  # fmt: skip
        sys.stdout.write(json.dumps(shown | {"pulls": pulls}, indent=1) + "\n")
        if status:
            sys.stdout.write(tails(folder) + "\n")
    return status


def hardware() -> str:
    """The GPUs, asked in another process: this one holds none."""
    question = (
        "import torch; n = torch.cuda.device_count(); "
        "print(f'{n} x {torch.cuda.get_device_name()}' if n else 'CPU')"
    )
    asked = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
