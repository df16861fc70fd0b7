"""A rollout worker joins a live run with a model server of its own, on another GPU, and leaves it.

    python -m tests.gpu.joiner --base runs/pretrained-base --folder runs/join --out joiner.json
    python -m tests.gpu.joiner --demo --cpu --python .venv-vllm/bin/python --out cpu.json
    python -m tests.gpu.joiner --demo --built-in --out toy.json    # without a server

`rlstreams up` with everything on the first GPU; after `--joins` steps `worker server --join` on the
second and `worker rollout --join` with its address, as infra/docs/several-hosts.md has it; after as
many steps with its samples again, both get SIGTERM. The file says, from the log: seconds from the
joiner's start to its server's readiness and to its first sample, tokens sampled a second before,
with it and after it, and the audit. *The others pause 0 times*: of the gaps between their samples
while it joins and while it leaves, none is longer than `PAUSE` times the longest before. The status
is 1 if one is, or the audit is not clean.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlstreams import open_run
from rlstreams.schemas.events import StepCompleted, Trajectory
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.workers import JOINED_FROM
from rlstreams.workers.config.load import load
from tests.gpu.result import kept
from tests.gpu.whole_run import EXAMPLES, ON_CPU, hardware, run_it, tails, told_by_the_log

JOINER = f"rollout-{JOINED_FROM}"
PRETRAINED = ["pretrained/run.toml", "pretrained/one-gpu.toml"]
DEMO = ["demo.toml", "demo-vllm.toml"]
# One server of the run, so that samples are what it waits for.
SCARCE = ("rollout.workers=1", "rollout.slots=128", "engine.max_running=128")
POLL_S = 0.5
PAUSE, PAUSE_S = 2.0, 1.0  # times the longest gap before, and at least so long
AROUND_S = 10.0  # behind its first sample, and behind its end
LEAVES_S = 40.0
END_S = 60.0  # of the limit: to leave, to end the run and to read its log


def configured(args: argparse.Namespace) -> tuple[list[Path], list[str]]:
    """Files and words of the run."""
    named = DEMO[: 1 if args.built_in else 2] if args.demo else PRETRAINED
    files = [EXAMPLES / name for name in named]
    words = [f"run.dir={args.folder}/{{id}}", "run.id=joined", f"trainer.steps={args.steps}"]
    words += [f"broker.jars_dir={args.jars}"] if args.jars else []
    words += [f"engine.python={args.python}"] if args.python else []
    if not args.demo:
        words += [f"data.{name}={args.base}/{name}.jsonl" for name in ("train", "held_out")]
        words += [f"model.path={args.base}/model", "prompts.evaluate_every=0", *SCARCE]
    words += ON_CPU if args.cpu else ()
    words += ["rollout.workers=1", "demo.kills=[]"] if args.built_in else []
    return files, [*words, *(word.removeprefix("--") for word in args.overrides)]


class Watched:
    """The run's steps and the joiner's samples, counted while the run is live."""

    def __init__(self, run: Path, until_s: float) -> None:
        """
        Args:
            until_s: deadline of all waits, by the monotonic clock.

        Raises:
            TimeoutError: it has no log by then; names the last reason.
        """
        self._log = opened(run, until_s)
        left_s = until_s - time.monotonic()
        self._events = self._log.follow(
            StepCompleted, Trajectory, deadline_s=left_s, from_start=True
        )
        self.num_steps = self.num_samples = 0

    def until(self, what: str, found: Callable[[], bool]) -> None:
        """Until `found()`; a deadline names what was waited for, and how far it came."""
        while not found():
            record = next(self._events, None)
            if record is None:
                raise TimeoutError(
                    f"{what} was not there in time: the run has {self.num_steps} steps, "
                    f"{JOINER} {self.num_samples} samples"
                )
            self.num_steps += isinstance(record.event, StepCompleted)
            self.num_samples += getattr(record.event, "worker", "") == JOINER

    def steps(self, more: int) -> None:
        """Until so many more steps are done."""
        wanted = self.num_steps + more
        self.until(f"step {wanted}", lambda: self.num_steps >= wanted)

    def first_sample(self) -> None:
        """Until the joiner has one."""
        self.until(f"the first sample of {JOINER}", lambda: self.num_samples > 0)

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def opened(run: Path, until_s: float) -> RunLog:
    """The log of a run that is about to begin."""
    while True:
        try:
            return open_run(run)
        except StreamsError as err:  # there is no run yet, or no broker
            if time.monotonic() > until_s:
                raise TimeoutError(f"{run} has no log that can be read: {err}") from err
        time.sleep(POLL_S)


def of_joiner(log: Any) -> Iterator[Trajectory]:
    """Its samples."""
    events = (record.event for record in log.read(Trajectory))
    return (event for event in events if event.worker == JOINER)


def joined(args: argparse.Namespace, run: Path) -> list[subprocess.Popen[bytes]]:
    """Server and worker of another host; their files lie apart from the run's."""
    (address,) = re.findall(r"127\.0\.0\.1:\d+", (run / "up.log").read_text())[:1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = args.folder / "elsewhere"
    where.mkdir(parents=True, exist_ok=True)
    log_in = ["--join", address, "--run", "joined", "--password-file", run / "broker/password",
              f"--weights.secret=file:{run}/weights.secret"]  # fmt: skip
    own = [f"--engine.python={Path(args.python).absolute()}"] if args.python else []
    if not args.cpu:
        own.append("--engine.env.CUDA_VISIBLE_DEVICES=1")
    roles = (["server", f"--engine.port={port}", *own],
             ["rollout", f'--engine.urls=["http://127.0.0.1:{port}"]', *own])  # fmt: skip
    found = []
    for role, *words in [["rollout"]] if args.built_in else roles:
        with (where / f"{role}.log").open("wb") as log:
            found.append(
                subprocess.Popen(
                    [sys.executable, "-m", "rlstreams", "worker", role, *map(str, log_in), *words],
                    stdout=log, stderr=subprocess.STDOUT, cwd=where, start_new_session=True,
                )
            )  # fmt: skip
    return found


def left(processes: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """SIGTERM to both, the worker first; their statuses, None for one that had to be killed."""
    statuses: list[int | None] = []
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)
        try:
            statuses.append(process.wait(LEAVES_S))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            statuses.append(None)
    return statuses


def sampled(event: Trajectory) -> int:
    """Tokens of the policy."""
    return sum(len(s.token_ids.numpy()) for s in event.segments if s.author == "policy")


def figures(run: Path, moments_ms: dict[str, float]) -> dict[str, Any]:
    """From the log: rates by who was there, and the others' longest silence."""
    with open_run(run) as log:
        events = [record.event for record in log.read(Trajectory)]
        own = list(of_joiner(log))
    came, went = min(one.finished_at_ms for one in own), max(one.finished_at_ms for one in own)
    began = min(one.finished_at_ms for one in events)
    periods = {"before": (began, moments_ms["started"]), "with it": (came, moments_ms["told"]),
               "after": (went, max(one.finished_at_ms for one in events))}  # fmt: skip

    def rate(period: tuple[float, float]) -> float:
        begin, end = period
        tokens = sum(sampled(one) for one in events if begin < one.finished_at_ms <= end)
        return round(1000 * tokens / max(end - begin, 1.0), 1)

    others = sorted(one.finished_at_ms for one in events if one.worker != JOINER)
    joined = (moments_ms["started"], came + 1000 * AROUND_S)
    leaving = (moments_ms["told"], moments_ms["left"] + 1000 * AROUND_S)
    return {
        "first_sample_s": (min(one.started_at_ms for one in own) - moments_ms["started"]) / 1000,
        "samples": len(own),
        "of_all_meanwhile": round(
            len(own) / sum(came <= one.finished_at_ms <= went for one in events), 3
        ),
        "sampled_tokens_per_s": {name: rate(period) for name, period in periods.items()},
        **pauses(others, {"joining": joined, "leaving": leaving}),
    }


def pauses(
    others_ms: Sequence[float], periods_ms: dict[str, tuple[float, float]]
) -> dict[str, Any]:
    """The longest gap between the others' samples in each period and before the first, and how
    often one was a pause. A gap counts if a part of it is there."""
    gaps = [(end, (end - begin) / 1000) for begin, end in pairwise(others_ms)]
    started_ms = min(begin for begin, _ in periods_ms.values())
    before_s = max((gap for at, gap in gaps if at <= started_ms), default=0.0)
    found = {
        name: [gap for at, gap in gaps if at > begin and at - 1000 * gap < end]
        for name, (begin, end) in periods_ms.items()
    }
    longest = max(PAUSE_S, PAUSE * before_s)
    return {
        "others_longest_gap_s": {"before": before_s}
        | {name: max(own, default=0.0) for name, own in found.items()},
        "others_paused": sum(gap > longest for own in found.values() for gap in own),
    }


def scenario(args: argparse.Namespace, run: Path, told: dict[str, Any], until_s: float) -> None:
    """Join, work, leave; moments and statuses into `told`, also if it fails.

    Args:
        until_s: deadline of its waits, by the monotonic clock.
    """
    watched = Watched(run, until_s)
    try:
        watched.steps(args.joins)
        told["moments_ms"] = moments = {"started": time.time() * 1000}
        processes = joined(args, run)
        try:
            watched.first_sample()
            watched.steps(args.joins)
        finally:
            moments["told"] = time.time() * 1000
            told["statuses"] = left(processes)
            moments["left"] = time.time() * 1000
    finally:
        watched.close()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, help="folder of model and rows")
    parser.add_argument("--demo", action="store_true", help="the demo in place of the pretrained")
    parser.add_argument("--cpu", action="store_true", help="vLLM for the CPU, and gloo")
    parser.add_argument("--built-in", action="store_true", help="the demo's engine, no server")
    parser.add_argument("--folder", type=Path, default=Path("runs/join"))
    parser.add_argument("--python", default="", help="of the servers' environment")
    parser.add_argument("--jars", default="", help="folder of the broker's jars")
    parser.add_argument("--steps", type=int, default=1000, help="at most: it ends once all is seen")
    parser.add_argument("--joins", type=int, default=3, help="after so many steps; leaves as later")
    parser.add_argument("--limit-s", type=float, default=235.0, help="for all of it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="after --: fields of the configuration")
    args = parser.parse_args(argv)
    args.folder = args.folder.resolve()
    if not args.demo:
        if args.base is None:
            parser.error("--base or --demo")
        args.base = args.base.resolve()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The run in a thread, the joiner beside it; 1 unless the audit is clean, it worked, and the
    others went on."""
    args = parse(argv)
    files, words = configured(args)
    config = load(files, words)
    run = Path(config.folder)
    status: list[int] = []
    enough = threading.Event()  # more steps say nothing about it

    def work() -> None:
        status.append(run_it(files, words, run, args.limit_s, enough=enough))

    thread = threading.Thread(target=work, daemon=True)
    until_s = time.monotonic() + args.limit_s - END_S
    with kept(args.out, args.limit_s) as told:
        told |= {"hardware": hardware(), "overrides": words}
        thread.start()
        try:
            scenario(args, run, told, until_s)
            time.sleep(AROUND_S)  # who stays takes over
        except TimeoutError as err:
            told["late"] = str(err)
        finally:
            enough.set()
            thread.join(args.limit_s)
            told["status"] = status[0] if status else None
            tell_logs(args.folder / "elsewhere", run if status != [0] else None)
        with open_run(run):  # its broker is started once for all that read
            found = told_by_the_log(config)
            told |= {name: found[name] for name in ("steps", "tokens_per_s", "audit_ok")}
            if "late" not in told:
                told["joiner"] = figures(run, told["moments_ms"])
    went_on = "joiner" in told and told["joiner"]["others_paused"] == 0
    return int(not (told["audit_ok"] and status == [0] and went_on))


def tell_logs(elsewhere: Path, run: Path | None) -> None:
    """Print the joiner's last lines, and those of a run that failed."""
    for log in elsewhere.glob("*.log"):
        sys.stdout.write(f"==> {log}\n{log.read_text(errors='replace')[-2000:]}\n")
    if run:
        sys.stdout.write(tails(run) + "\n")


if __name__ == "__main__":
    sys.exit(main())
