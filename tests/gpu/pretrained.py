"""The pretrained example to its result: warm-up, runs of several seeds, a control, evaluations.

    python -m tests.gpu.pretrained --folder runs/pretrained --gpus 2 --limit-s 300
    python -m tests.gpu.pretrained --folder runs/pretrained --runs seed0 --model hf:Qwen/Qwen3-0.6B
    python -m tests.gpu.pretrained --folder runs/agent --runs agent,one-turn,agent-control --gpus 2
    python -m tests.gpu.pretrained --runs kl,long --gpus 2 --limit-s 400 --go-on  # again and again

Each stage leaves a file, and the same command goes on behind the last one, so that what a sitting
cannot hold is done in the next: `warm.json` (accuracy after the warm-up), `shots.json` (of the
model as it came, with four solved problems before each), rows of what is right in 5 to 50 %, for
each run `NAME.json` (its curve) and `NAME-after.json`, `forgotten.json`. `result.json` has them
all. Runs `agent` are of the agent with a calculator, after a warm-up of their own, and `one-turn`
of the same problems without it; their result is the curve. Run `kl` stays close to the warmed-up
model, `long` has twice the steps. With `--go-on` a run that its limit ended goes on behind its
last step, and its model is evaluated again. Runs are dealt out to the GPUs in their order; the
second one of a GPU starts `--stagger-s` later, when the servers of the first are up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlstreams.workers.config.load import load
from tests.gpu.end_to_end import GROUP
from tests.gpu.whole_run import hardware

EXAMPLE = "infra.examples.pretrained"
OVERLAYS = Path(__file__).resolve().parents[2] / "infra/examples/pretrained"
ONE_GPU, OF_AGENT = OVERLAYS / "one-gpu.toml", OVERLAYS / "agent.toml"
KINDS = "story,units,compare,date"  # that a calculator helps
RUNS = {
    "seed0": ("run.seed=0",),
    "control": ("run.seed=0", "trainer.control=permuted"),
    "seed1": ("run.seed=1",),
    "seed2": ("run.seed=2",),
    # As peers weigh k3 of a token: 0.001 (verl) to 0.04 (DeepSeekMath, arXiv 2402.03300, 4.2).
    "kl": ("run.seed=0", "trainer.loss.kl_coef=0.02"),
    "long": ("run.seed=0", "trainer.steps=600"),
    # A grid of learning rates; the example's own is in its run.toml.
    "lr2e-6": ("run.seed=0", "trainer.optimizer.lr=2e-6"),
    "lr1e-5": ("run.seed=0", "trainer.optimizer.lr=1e-5"),
    "agent": ("run.seed=0",),
    "agent-control": ("run.seed=0", "trainer.control=permuted"),
    "agent-seed1": ("run.seed=1",),
    "agent-seed2": ("run.seed=2",),
    "one-turn": ("run.seed=0",),
}
AGENT = {"agent", "agent-control", "agent-seed1", "agent-seed2"}
ALONE = "one-turn"
BY_CURVE = AGENT | {ALONE}
RESULT = ("seed0", "control", "seed1", "seed2")
STAGE_S = 900.0


class Driver:
    """Stages over one folder.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._folder: Path = args.folder
        self._base = self._folder / "base"
        self._agent_base = self._folder / "agent-base"
        self._alone_base = self._folder / "one-turn-base"
        self._shown = threading.Lock()
        self._started_s = time.monotonic()

    def stage(self, name: str, result: Path, module: str, *words: object, gpu: int = 0) -> bool:
        """Run a module unless its result is there; whether it is there now. Its log is NAME.log."""
        if result.exists():
            return True
        device, visible = "cpu" if self._args.cpu else "cuda", self._args.first_gpu + gpu
        given = [device if word == "DEVICE" else str(word) for word in words]
        environment = {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": str(visible)}
        with (self._folder / f"{name}.log").open("w", encoding="utf-8") as log:
            try:
                status = subprocess.run(
                    [sys.executable, "-m", module, *given], stdout=log, stderr=subprocess.STDOUT,
                    env=os.environ | environment, timeout=self._args.limit_s + STAGE_S, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = 124
        self.say(f"{name}: {'done' if result.exists() else f'status {status}'}")
        return result.exists()

    def say(self, text: str) -> None:
        """A line with the seconds so far."""
        with self._shown:
            sys.stdout.write(f"[{time.monotonic() - self._started_s:5.0f} s] {text}\n")
            sys.stdout.flush()

    def evaluated(self, name: str, model: Path, *words: object, gpu: int = 0) -> bool:
        """Accuracy of a folder on the held-out problems of all kinds and levels."""
        out = self._folder / f"{name}.json"
        return self.stage(
            name, out, "infra.examples.reasoner.evaluate", "--tasks", f"{EXAMPLE}.tasks",
            "--model", model, "--rows", self._args.rows, "--samples", self._args.samples,
            "--max-new-tokens", self._args.tokens, "--device", "DEVICE", "--out", out, *words,
            gpu=gpu,
        )  # fmt: skip

    def prepared(self, runs: Sequence[str]) -> bool:
        """What these runs begin with."""
        dialogues = not AGENT.intersection(runs) or self._of_tools(self._agent_base, "--calculator")
        alone = ALONE not in runs or self._of_tools(self._alone_base)
        return dialogues and alone and (BY_CURVE.issuperset(runs) or self._prepared())

    def _warmed_up(self, name: str, model: Path, *words: object) -> bool:
        return self.stage(
            name, model / "warm_up.json", f"{EXAMPLE}.warm_up", "--model", self._args.model,
            "--out", model, "--steps", self._args.warm_up, "--device", "DEVICE",
            *(("--batch", 2, "--micro", 2) if self._args.cpu else ()), *words,
        )  # fmt: skip

    def _of_tools(self, base: Path, *words: str) -> bool:
        """Warmed up, with `--calculator` on dialogues; rows of what it helps in, of all levels."""
        name = base.name.removesuffix("-base")
        return self._warmed_up(f"{name}-warm_up", base / "model", *words) and self.stage(
            f"{name}-rows", base / "train.jsonl", f"{EXAMPLE}.tasks", "--out", base, "--only", KINDS
        )

    def _prepared(self) -> bool:
        """Warmed up, measured, and rows of what it is right in now and then."""
        model = self._base / "model"
        with ThreadPoolExecutor() as pool:
            as_it_came = pool.submit(self._as_it_came)
            is_warm = self._warmed_up("warm_up", model) and self.evaluated("warm", model)
            if not as_it_came.result():
                self.say("the model as it came was not measured")
        rows = self._base / "train.jsonl"
        of = () if self._args.cpu else ("--of", self._folder / "warm.json")
        return is_warm and self.stage("rows", rows, f"{EXAMPLE}.tasks", "--out", self._base, *of)

    def _as_it_came(self) -> bool:
        """With the template alone: four solved problems stand before each."""
        given, last = self._base / "given", self._args.gpus - 1
        return self.stage(
            "given", given / "warm_up.json", f"{EXAMPLE}.warm_up", "--model", self._args.model,
            "--out", given, "--steps", 0, "--device", "DEVICE", gpu=last,
        ) and self.evaluated("shots", given, "--shots", 4, "--samples", 2, gpu=last)  # fmt: skip

    def ran(self, place: int, name: str) -> bool:
        """A run to its end or limit, its model, that model's accuracy."""
        gpu, wait_s = place % self._args.gpus, place // self._args.gpus * self._args.stagger_s
        out, after = self._folder / f"{name}.json", self._folder / f"after-{name}"
        if self._args.go_on:
            self.unfinished(name)
        if not out.exists():
            time.sleep(wait_s)
        words = [f"--run.id={name}", *(f"--{word}" for word in RUNS[name])]
        if not self._args.cpu:  # `cuda:0` is then that GPU to the roles; its server has the number
            words += [f"--engine.env.CUDA_VISIBLE_DEVICES={self._args.first_gpu + gpu}"]
        base, more = self._base, list[object]()
        if name in BY_CURVE:
            samples = GROUP * load([OVERLAYS / "run.toml", OF_AGENT]).trainer.groups_per_step
            base, more = self._alone_base, ["--samples", samples]
        if name in AGENT:
            base, more = self._agent_base, [*more, "--overlay", OF_AGENT]
        is_there = self.stage(
            name, out, "tests.gpu.reasoner", "--example", "pretrained", "--gpus", 1,
            "--overlay", ONE_GPU, *more, "--base", base, "--folder", self._folder / "runs",
            "--steps", self._args.steps, "--every", self._args.every, "--limit-s",
            self._args.limit_s, *(("--jars", self._args.jars) if self._args.jars else ()),
            "--out", out, "--", *words, *self._args.overrides, gpu=gpu,
        )  # fmt: skip
        if not is_there or name in BY_CURVE:
            return is_there
        is_there = self.stage(
            f"{name}-export", after / "config.json", "rlstreams", "export", "model",
            self._folder / "runs" / name, "--out", after, gpu=gpu,
        )  # fmt: skip
        return is_there and self.evaluated(f"{name}-after", after, gpu=gpu)

    def unfinished(self, name: str) -> None:
        """Remove the results of a run that ended before its last step; the run itself stays."""
        out, after = (self._folder / f"{name}{end}.json" for end in ("", "-after"))
        own = dict(word.split("=", 1) for word in RUNS[name])
        wanted = int(own.get("trainer.steps", self._args.steps))
        if out.exists() and (steps := json.loads(out.read_text("utf-8"))["steps"]) < wanted:
            self.say(f"{name}: goes on behind step {steps} of {wanted}")
            out.unlink()
            after.unlink(missing_ok=True)
            shutil.rmtree(self._folder / f"after-{name}", ignore_errors=True)

    def result(self) -> dict[str, Any]:
        """All files that are there, as one."""
        told: dict[str, Any] = {"hardware": hardware(), "model": self._args.model, "runs": {}}
        for name in ("shots", "warm", "forgotten"):
            path = self._folder / f"{name}.json"
            told[name] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        bases = ("", self._base), ("agent_", self._agent_base), ("one_turn_", self._alone_base)
        for key, base in bases:
            warm_up = base / "model" / "warm_up.json"
            if warm_up.exists():
                told[f"{key}warm_up"] = json.loads(warm_up.read_text(encoding="utf-8"))
        for name in RUNS:
            paths = [self._folder / f"{name}{end}.json" for end in ("", "-after")]
            own = [json.loads(p.read_text(encoding="utf-8")) for p in paths if p.exists()]
            if own:
                told["runs"][name] = own[0] | ({"after": own[1]} if len(own) > 1 else {})
        return told

    def finish(self) -> None:
        """What was forgotten, by all models that there are; then the result."""
        models = [self._base / "given", self._base / "model"]
        models += [self._folder / f"after-{name}" for name in RUNS]
        there = [model for model in models if (model / "config.json").exists()]
        out = self._folder / "forgotten.json"
        out.unlink(missing_ok=True)
        if there:
            small = ("--windows", 1) if self._args.cpu else ()
            words = ("--device", "DEVICE", "--out", out, *small, *there)
            self.stage("forgotten", out, f"{EXAMPLE}.forgotten", *words)
        self.write()

    def write(self) -> None:
        """`result.json`, whole or not at all."""
        new = self._folder / "result.new"
        new.write_text(json.dumps(self.result(), indent=1) + "\n", encoding="utf-8")
        shutil.move(new, self._folder / "result.json")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/pretrained-result"))
    parser.add_argument("--model", default="runs/pretrained-base/gemma", help="or hf:ORG/NAME")
    parser.add_argument("--runs", default=",".join(RESULT), help="in the order of their worth")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--first-gpu", type=int, default=0, help="number of the first of them")
    parser.add_argument("--stagger-s", type=float, default=100.0)
    parser.add_argument("--limit-s", type=float, default=420.0, help="of a run, its start included")
    parser.add_argument("--go-on", action="store_true", help="with runs that their limit ended")
    parser.add_argument("--warm-up", type=int, default=100, help="steps")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps between points of the curve")
    parser.add_argument("--rows", type=int, default=20, help="evaluated, of a kind and level")
    parser.add_argument("--samples", type=int, default=8, help="answers to each of them")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--jars", default="", help="folder of the broker's jars")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal; rows of all levels")
    parser.add_argument("overrides", nargs="*", help="behind --: fields of the runs' configuration")
    args = parser.parse_args(argv)
    if unknown := set(args.runs.split(",")) - RUNS.keys():
        parser.error(f"--runs {', '.join(unknown)}: there are {', '.join(RUNS)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """All stages; 1 if a run has no result."""
    args = parse(argv)
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    driver = Driver(args)
    names = args.runs.split(",")
    if not driver.prepared(names):
        return 1
    with ThreadPoolExecutor(len(names)) as pool:
        done = list(pool.map(driver.ran, range(len(names)), names))
    driver.finish()
    return int(not all(done))


if __name__ == "__main__":
    sys.exit(main())
