"""An example's run, or TRL's on the same model and rows: accuracy over GPU-seconds.

    python -m tests.gpu.reasoner --limit-s 400 --out ours.json --log reasoner.tar.gz
    python -m tests.gpu.reasoner --gpus 1 --overlay .../reasoner/one-gpu.toml --out one.json
    python -m tests.gpu.reasoner --kill-every 45 --steps 100 --out fire.json  # tests.chaos
    python -m tests.gpu.reasoner --peer trl --limit-s 300 --out trl.json  # two GPUs, or --gpus 1
    python -m tests.gpu.reasoner --out permuted.json -- --run.id=permuted --trainer.control=permuted

Model and rows are those that the README of `--example` makes (without: the reasoner's); what is not
said is as in its run.toml. `--log` keeps the run's log
in a file; one that is there is continued: without a checkpoint the trainer does the steps of the
log again, from the same base model. A second counts once for each GPU; the clock starts at the end
of the first step and stands still between two trainers, except under `--kill-every`. Held-out rows
are the same; TRL's kept models answer them after its run, which its clock does not count.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlstreams import open_run
from rlstreams.schemas.events import EVALUATE, Prompt, Trajectory
from rlstreams.streams.log.group_ids import evaluation_id
from rlstreams.workers.config.load import load
from tests.gpu.end_to_end import CARDS, GROUP, PEERS, trl
from tests.gpu.whole_run import hardware, run_it, tails, told_by_the_log

EXAMPLES = Path(__file__).resolve().parents[2] / "infra" / "examples"
KILLED = "trainer,rollout,logprob,broker"
EVALUATED_AT_ONCE = 3  # kept models, on one card
LEFT_OUT = ("checkpoints", "weights", "up.log")


def packed(run: Path, log: Path) -> None:
    """Keep a run's folder, without what can be computed from its log."""

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if Path(member.name).name in LEFT_OUT else member

    with tarfile.open(log, "w:gz", compresslevel=1) as archive:
        archive.add(run, run.name, filter=kept)


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """`rlstreams up` until its last step or the limit; then its log is read."""
    words = [
        f"run.dir={args.folder}/{{id}}",
        f"data.train={args.base}/train.jsonl",
        f"data.held_out={args.base}/held_out.jsonl",
        f"model.path={args.base}/model",
        f"prompts.evaluate_every={args.every}",
        f"trainer.steps={args.steps}",
        f"trainer.groups_per_step={args.samples // GROUP}",
        f"trainer.optimizer.lr={args.lr}",
        f"rollout.max_new_tokens={args.tokens}",
        *([f"broker.jars_dir={args.jars}"] if args.jars else []),
        *(word.removeprefix("--") for word in args.overrides),
    ]
    files = [EXAMPLES / args.example / "run.toml", *args.overlay]
    config = load(files, words)
    run = Path(config.folder)
    if args.log and args.log.exists() and not run.exists():
        with tarfile.open(args.log) as archive:
            archive.extractall(run.parent, filter="data")
    if args.kill_every and (run / "broker").exists():
        raise SystemExit(f"{run} is there already: chaos goes on with no run")
    resume = ["resume"] if (run / "broker").exists() else []
    command = ["rlstreams", "up"]
    if args.kill_every:
        roles = KILLED if config.rollout.engine == "builtin" else f"{KILLED},server"
        command = ["tests.chaos", "--every", str(args.kill_every), "--roles", roles]
        command += [
            "--kills",
            str(args.kills),
            "--seed",
            str(args.kill_seed),
            "--json",
            str(args.out.with_suffix(".chaos.json")),
        ]
    status = run_it(files, [*words, *resume], run, args.limit_s, command)
    sys.stdout.write((run / "up.log").read_text(encoding="utf-8", errors="replace")[-3000:])
    if status not in (0, 124):
        sys.stdout.write(tails(run) + "\n")
    try:
        told = told_by_the_log(config)
        keys = (
            "steps",
            "step_ends_s",
            "reward",
            "train_s",
            "states_s",
            "mismatch_mean",
            "audit_ok",
        )
        return {"status": status, "curve": curve_of(run, args)} | {key: told[key] for key in keys}
    finally:
        if args.log:
            packed(run, args.log)


def curve_of(run: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Accuracy at each evaluation: mean and number, `walk 3`, `walk`, `all 3`, `all`."""
    rewards: dict[int, dict[str, list[float]]] = {}
    with open_run(run) as log:
        rows = {
            record.event.group_id: json.loads(record.event.metadata)
            for record in log.read(Prompt)
            if record.event.purpose == EVALUATE
        }
        epochs = [0 if args.kill_every else step.epoch for step in log.steps()]
        ends = [step.finished_at_ms / 1000 for step in log.steps()]
        clock = gpu_seconds(list(zip(epochs, ends, strict=True)), args.gpus)
        for record in log.read(Trajectory):
            row, found = rows.get(record.event.group_id), evaluation_id(record.event.group_id)
            if row and found:
                version = rewards.setdefault(found[0], collections.defaultdict(list))
                task, level = row["task"], row["level"]
                for name in (f"{task} {level}", task, f"all {level}", "all"):
                    version[name].append(record.event.reward)
    return [
        {
            "step": version,
            "gpu_s": clock[version],
            "accuracy": {k: [round(sum(v) / len(v), 4), len(v)] for k, v in sorted(of.items())},
        }
        for version, of in sorted(rewards.items())
        if version < len(clock)
    ]


def gpu_seconds(ends: Sequence[tuple[int, float]], gpus: int) -> list[float]:
    """Of each step, from 0 for the start and for the first; `ends`: epoch and seconds."""
    clock = [0.0, 0.0]
    for (epoch_before, before_s), (epoch, end_s) in pairwise(ends):
        clock.append(round(clock[-1] + gpus * (end_s - before_s) * (epoch == epoch_before), 2))
    return clock[: len(ends) + 1]


def theirs(args: argparse.Namespace) -> dict[str, Any]:
    """TRL's run, then the accuracy of each model that it kept."""
    tasks = f"infra.examples.{args.example}.tasks"
    more = ["--tasks", tasks, "--lr", str(args.lr), "--keep-every", str(args.every)]
    more += ["--micro", str(args.peer_micro), "--seed", str(args.peer_seed)]
    args.prompt = 512
    args.folder.mkdir(parents=True, exist_ok=True)
    found = trl(args, args.base, more, one_gpu=args.gpus == 1, case=args.peer, own=args.folder)
    clock = gpu_seconds([(0, end_s) for end_s in found["ends_s"]], args.gpus)
    lines = (args.base / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = collections.Counter((row["task"], row["level"]) for row in map(json.loads, lines))
    levels = ",".join(map(str, sorted({level for _, level in held_out})))
    words = ["--tasks", tasks, "--levels", levels, "--rows", str(min(held_out.values()))]
    words += ["--samples", "1", "--max-new-tokens", str(args.tokens)]

    def point(step: int) -> dict[str, Any] | None:
        """One of the curve; None where the limit fell into the keeping of this model."""
        model = args.folder / f"kept-{step}" if step else args.base / "model"
        out = args.folder / f"accuracy-{step}.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", "infra.examples.reasoner.evaluate", "--model", str(model)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": args.cards.split(",")[0]}
        subprocess.run([*command, *words, "--out", str(out)], env=environment, check=False)
        if not out.exists():
            return None
        told = json.loads(out.read_text(encoding="utf-8"))["accuracy"]
        accuracy = together({one: told[f"{one[0]} {one[1]}"] for one in sorted(held_out)})
        return {"step": step, "gpu_s": clock[step], "accuracy": accuracy}

    with ThreadPoolExecutor(EVALUATED_AT_ONCE) as pool:
        points = list(pool.map(point, range(0, len(clock), args.every)))
    return found | {"curve": [one for one in points if one]}


def together(cells: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, list[float]]:
    """Mean and number of answers as `curve_of` has them, of what `evaluate` says of each kind and
    level."""
    found = collections.defaultdict[str, list[tuple[float, int]]](list)
    for (task, level), cell in cells.items():
        for name in (f"{task} {level}", task, f"all {level}", "all"):
            found[name].append((cell["pass@1"][0], cell["problems"]))
    return {
        name: [round(sum(mean * n for mean, n in own) / sum(n for _, n in own), 4),
               sum(n for _, n in own)]
        for name, own in sorted(found.items())
    }  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--example", choices=("reasoner", "pretrained"), default="reasoner")
    parser.add_argument("--peer", choices=["", *PEERS], default="")
    parser.add_argument("--overlay", type=Path, action="append", default=[], help="over run.toml")
    parser.add_argument("--gpus", type=int, default=2, help="that the run has")
    parser.add_argument("--cards", default="", help="of a peer's trainer and server")
    parser.add_argument("--peer-budget", type=int, help="tokens of a row, two GPUs; 0: none")
    parser.add_argument("--peer-micro", type=int, default=64, help="samples of a micro-batch")
    parser.add_argument("--peer-seed", type=int, default=42, help="TRL's own is 42")
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds between two kills")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--kill-seed", type=int, default=0, help="of the plan: who is struck, when")
    parser.add_argument("--base", type=Path, help="folder of model and rows")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="for the run's own")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--samples", type=int, help="of a step")
    parser.add_argument("--tokens", type=int, help="of an answer, at most")
    parser.add_argument("--every", type=int, help="steps between points of the curve")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument("--log", type=Path, help="file of the run's log: continued, kept")
    parser.add_argument("--jars", default="", help="folder of the broker's jars")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="behind --: fields of our configuration")
    args = parser.parse_args(argv)
    as_it_is = load([EXAMPLES / args.example / "run.toml"])
    usual = {
        "base": Path(f"runs/{args.example}-base"),
        "steps": as_it_is.trainer.steps,
        "samples": as_it_is.trainer.groups_per_step * GROUP,
        "tokens": as_it_is.rollout.max_new_tokens,
        "every": as_it_is.prompts.evaluate_every,
        "lr": as_it_is.trainer.optimizer.lr,
    }
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write the curve, show it; 1 without a curve."""
    args = parse(argv)
    args.base, args.folder = args.base.resolve(), args.folder.resolve()
    args.cards = args.cards or CARDS
    found = theirs(args) if args.peer else ours(args)
    names = ("peer", "gpus", "kill_every", "steps", "samples", "lr", "peer_seed", "overrides")
    asked = {name: getattr(args, name) for name in names}
    result = {"hardware": hardware()} | asked | found
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for point in found["curve"]:
        accuracy = {name: mean for name, (mean, _) in point["accuracy"].items()}
        told = {name: mean for name, mean in accuracy.items() if name.startswith("all")}
        sys.stdout.write(f"step {point['step']:4} {point['gpu_s']:8.1f} GPU-s  {told}\n")
    return int(not found["curve"])


if __name__ == "__main__":
    sys.exit(main())
