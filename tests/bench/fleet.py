"""Rollout workers that come, go and die, in a whole run on a real broker; engines that wait.

    python -m tests.bench.fleet scale --json scale.json    # 1 to 4 to 2 workers, a kill at 4
    python -m tests.bench.fleet churn --json churn.json    # 20 joins and leaves in 5 minutes

The demo's model learns by prompts, log-prob worker and trainer of `rlstreams worker`; each rollout
worker joins by `--join` and has an engine whose steps take time and no processor
(`tests.bench.fleet_process`). All figures are the log's: `scale` tells the sampled tokens a second
with each number of workers, from when the last of them has its first sample; a kill is part of
none of these periods, and its cost is told apart. `churn` ends workers by SIGTERM and SIGKILL by
turns. The status is 1 if the audit finds anything, or the worker that is to stay did not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rlstreams.schemas.events import StepCompleted, Trajectory, WorkerReport
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.run.open_run import open_run
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.workers import JOINING
from tests.bench.fleet_process import started
from tests.bench.hardware import hardware

DEMO = Path(__file__).parents[2] / "infra/examples/demo.toml"
RUN = "fleet"
WORDS = (
    f"--run.id={RUN}", "--prompts.evaluate_every=0", "--trainer.groups_per_step=32",
    "--trainer.max_staleness=2", "--trainer.steps=100000", "--demo.kills=[]", "--model.threads=1",
)  # fmt: skip
ROLES = ("prompts", "trainer", "logprob")
SLOTS, STEP_S = 32, 0.25  # 128 tokens a second of each worker
JOINS_S, ENDS_S = 120.0, 60.0
POLL_S = 0.2


class Fleet:
    """A run on a broker of its own, and its rollout workers by the order of their start."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        self._broker = EmbeddedBroker(folder / "broker")
        self.address = self._broker.start().bootstrap
        self._common = [str(DEMO), *WORDS, f"--broker.bootstrap={self.address}",
                        f"--run.dir={folder / 'run'}"]  # fmt: skip
        self._count = 0
        made = self._started("topics", ["broker", "topics", *self._common])
        made.join(ENDS_S)
        assert made.exitcode == 0, (folder / "topics.log").read_text()
        self._roles = [self._started(role, ["worker", role, *self._common]) for role in ROLES]
        self.log: RunLog = open_run(RUN, bootstrap=self.address)

    def _started(self, name: str, words: list[str], step_s: float = 0.0) -> BaseProcess:
        return started(words, self.folder / f"{name}.log", step_s)

    def joined(self) -> BaseProcess:
        """One more worker."""
        self._count += 1
        words = ["worker", "rollout", "--join", self.address, "--run", RUN,
                 f"--rollout.slots={SLOTS}", "--deadlines.drain_s=10"]  # fmt: skip
        return self._started(f"rollout-{self._count}", words, STEP_S)

    def check(self) -> None:
        """Every role lives."""
        for role, process in zip(ROLES, self._roles, strict=True):
            if process.exitcode is not None:
                text = (self.folder / f"{role}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{role} ended with {process.exitcode}: {text}")

    def end(self, workers: list[BaseProcess]) -> None:
        """All drain, the trainer last."""
        for process in (*workers, *reversed(self._roles)):
            process.terminate()
        for process in (*workers, *self._roles):
            process.join(ENDS_S)
            if process.exitcode is None:
                process.kill()

    def close(self) -> None:
        """The broker too."""
        self.log.close()
        self._broker.stop()


def came(log: RunLog) -> dict[str, WorkerReport]:
    """The first report of each process of a rollout worker."""
    reports = (record.event for record in log.read(WorkerReport, skip_unreadable=True))
    return {one.instance: one for one in reports if one.state == JOINING and one.role == "rollout"}


def firsts(log: RunLog) -> dict[str, Trajectory]:
    """The first sample that each process finished."""
    found: dict[str, Trajectory] = {}
    for record in log.read(Trajectory):
        one = record.event
        before = found.setdefault(one.instance, one)
        if one.finished_at_ms < before.finished_at_ms:
            found[one.instance] = one
    return found


def wait(fleet: Fleet, what: str, reached: Callable[[], bool], limit_s: float = JOINS_S) -> None:
    """Look now and then; a deadline says what did not come."""
    until_s = time.monotonic() + limit_s
    while not reached():
        fleet.check()
        if time.monotonic() > until_s:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(POLL_S)


def now_ms() -> float:
    """As the log's times."""
    return time.time() * 1000


def scale(fleet: Fleet, args: argparse.Namespace) -> dict[str, Any]:
    """One worker, four, a kill and its successor, two."""
    workers: list[BaseProcess] = []
    periods: dict[str, tuple[float, float]] = {}

    def hold(name: str, settle_s: float = 0.0) -> None:
        time.sleep(settle_s)
        began_ms = now_ms()
        time.sleep(args.window_s)
        fleet.check()
        periods[name] = (began_ms, now_ms())

    def join(number: int) -> None:
        before = len(firsts(fleet.log))
        workers.extend(fleet.joined() for _ in range(number))
        wait(fleet, f"{number} more at work", lambda: len(firsts(fleet.log)) >= before + number)

    join(1)
    hold("1 worker", args.settle_s)
    join(3)
    hold("4 workers", args.settle_s)
    killed_ms = now_ms()
    workers[1].kill()
    join(1)
    del workers[1]
    hold("4 workers, one a successor", args.settle_s)
    for process in workers[2:]:
        process.terminate()
    for process in workers[2:]:
        process.join(ENDS_S)
    hold("2 workers", args.settle_s)
    fleet.end(workers[:2])
    samples = [record.event for record in fleet.log.read(Trajectory)]
    each = {name: rate(samples, period) for name, period in periods.items()}
    per_worker = {name: each[name] / int(name.split()[0]) for name in each}
    base = per_worker["1 worker"]
    return {
        "sampled_tokens_per_s": {name: round(value, 1) for name, value in each.items()},
        "of_linear": {name: round(value / base, 3) for name, value in per_worker.items()},
        "killed": around_kill(samples, killed_ms, periods["4 workers, one a successor"][0]),
    }


def rate(samples: list[Trajectory], period_ms: tuple[float, float]) -> float:
    """Tokens of the policy a second, by when each was sampled: a sample that is in a period by a
    part of its time counts by that part."""
    begin, end = period_ms
    tokens = 0.0
    for one in samples:
        inside = min(end, one.finished_at_ms) - max(begin, one.started_at_ms)
        if inside > 0:
            tokens += num_tokens(one) * inside / max(1, one.finished_at_ms - one.started_at_ms)
    return 1000 * tokens / (end - begin)


def num_tokens(sample: Trajectory) -> int:
    """Of the policy."""
    return sum(len(s.token_ids.numpy()) for s in sample.segments if s.author == "policy")


def around_kill(samples: list[Trajectory], killed_ms: float, until_ms: float) -> dict[str, float]:
    """How long nothing came, of all, and the rate until it was made up for."""
    times = sorted(s.finished_at_ms for s in samples if killed_ms <= s.finished_at_ms <= until_ms)
    gaps = [after - before for before, after in pairwise([killed_ms, *times])]
    return {
        "seconds": round((until_ms - killed_ms) / 1000, 1),
        "longest_gap_s": round(max(gaps) / 1000, 2),
        "sampled_tokens_per_s": round(rate(samples, (killed_ms, until_ms)), 1),
    }


def churn(fleet: Fleet, args: argparse.Namespace) -> dict[str, Any]:
    """One worker that stays; another joins every so many seconds, and leaves or dies later."""
    stays = fleet.joined()
    wait(fleet, "the first at work", lambda: bool(firsts(fleet.log)))
    began_s, began_ms = time.monotonic(), now_ms()
    each_s = args.seconds / args.joins
    there: list[tuple[BaseProcess, float]] = []  # each with when it leaves
    left = {"SIGTERM": 0, "SIGKILL": 0}
    statuses: list[int | None] = []
    for number in range(args.joins):
        there.append((fleet.joined(), began_s + (number + args.stays) * each_s))
        while time.monotonic() < began_s + (number + 1) * each_s:
            there = leave(there, left, statuses)
            fleet.check()
            time.sleep(POLL_S)
    while there:
        there = leave(there, left, statuses)
        fleet.check()
        time.sleep(POLL_S)
    seconds = time.monotonic() - began_s
    time.sleep(args.settle_s)  # who stays takes over
    ended_ms = now_ms()
    is_there = stays.exitcode is None  # who joins must not take the name of who is there
    fleet.end([stays])
    return {
        "joins": args.joins,
        "first_worker_stayed": is_there,
        "seconds": round(seconds, 1),
        "left": left,
        "statuses_of_drained": sorted({str(status) for status in statuses}),
        **joiners(fleet.log, began_ms, ended_ms),
    }


def leave(
    there: list[tuple[BaseProcess, float]], left: dict[str, int], statuses: list[int | None]
) -> list[tuple[BaseProcess, float]]:
    """Those that stay; the others were asked to drain or killed, by turns."""
    staying = []
    for process, until_s in there:
        if time.monotonic() < until_s:
            staying.append((process, until_s))
        elif sum(left.values()) % 2:
            process.kill()
            left["SIGKILL"] += 1
        else:
            process.terminate()
            process.join(ENDS_S)
            statuses.append(process.exitcode)
            left["SIGTERM"] += 1
    return staying


def joiners(log: RunLog, began_ms: float, ended_ms: float) -> dict[str, Any]:
    """How soon they worked, how much they did, and the longest time in which nobody finished."""
    samples = [record.event for record in log.read(Trajectory)]
    first = firsts(log)
    joined = {i: one for i, one in came(log).items() if one.at_ms >= began_ms}
    soon = [(first[i].started_at_ms - joined[i].at_ms) / 1000 for i in joined if i in first]
    times = sorted(s.finished_at_ms for s in samples if began_ms <= s.finished_at_ms <= ended_ms)
    gaps_s = sorted((after - before) / 1000 for before, after in pairwise(times))
    theirs = sum(num_tokens(one) for one in samples if one.instance in joined)
    return {
        "names": sorted({one.worker for one in joined.values()}),
        "worked": len(soon),
        "first_sample_begun_s": {
            "median": round(statistics.median(soon), 2), "worst": round(max(soon), 2)
        },
        "share_of_joiners": round(theirs / sum(map(num_tokens, samples)), 3),
        "longest_gaps_of_all_s": [round(gap, 2) for gap in gaps_s[:-6:-1]],
    }  # fmt: skip


def outcome(log: RunLog) -> dict[str, Any]:
    """What became of the samples."""
    report = audit(log.bus)
    return {
        "audit_ok": report.ok,
        "steps": sum(1 for _ in log.read(StepCompleted)),
        "issued": report.issued,
        "lost": report.lost,
        "duplicates": report.duplicates,
        "in_flight": {name: number for name, number in report.in_flight.items() if number},
    }


@contextmanager
def made(folder: Path) -> Iterator[Fleet]:
    """A fleet that is ended whatever happens."""
    fleet = Fleet(folder)
    try:
        yield fleet
    finally:
        fleet.end([])
        fleet.close()


def main() -> int:
    """One scenario; 1 if the audit finds anything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenario", choices=["scale", "churn"])
    parser.add_argument("--folder", type=Path, default=Path("runs/fleet"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--window-s", type=float, default=20.0, help="scale: of each number")
    parser.add_argument("--settle-s", type=float, default=5.0, help="before each period")
    parser.add_argument("--joins", type=int, default=20, help="churn: joins")
    parser.add_argument("--seconds", type=float, default=255.0, help="churn: from first to last")
    parser.add_argument("--stays", type=float, default=1.5, help="churn: times that between two")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["RLSTREAMS_PRELOAD_MODEL"] = str(DEMO.parent / "demo/model")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    found: dict[str, Any] = {"scenario": args.scenario, "hardware": hardware(),
                             "engine": {"slots": SLOTS, "step_s": STEP_S}}  # fmt: skip
    with made(args.folder.resolve()) as fleet:
        found |= {"scale": scale, "churn": churn}[args.scenario](fleet, args)
        found |= outcome(fleet.log)
    found["load_average_at_end"] = round(os.getloadavg()[0], 1)
    text = json.dumps(found, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.write_text(text, encoding="utf-8")
    return int(not (found["audit_ok"] and found.get("first_worker_stayed", True)))


if __name__ == "__main__":
    sys.exit(main())
