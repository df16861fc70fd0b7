"""What a kill every so many seconds costs a run: by `report`, and by hand from the records.

    python -m tests.chaos.cost [CONFIG] [--every 45] [--steps 200] [--json FILE]

Kills rollout, logprob, trainer and prompts in turn until the run is over. The hand computation
knows nothing of the folds: it reads every record once, and says of each figure what it is made of.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from rlstreams.__main__ import main as rlstreams
from rlstreams.cli.named import opened
from rlstreams.schemas.events import (
    TRAIN,
    DeadLetter,
    Event,
    GroupsDropped,
    StepCompleted,
    TrainerStarted,
    Trajectory,
    WorkerReport,
)
from rlstreams.show.metrics.figures import of_cost
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.topics import DEAD_LETTERS, STEPS, TRAJECTORIES, WORKER_EVENTS
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.views.feed import Views
from rlstreams.up.supervisor.fault_hook import EndedRun, FaultTargets, UpOptions
from rlstreams.up.supervisor.up import up
from rlstreams.workers.config.load import load
from tests.bench.hardware import hardware
from tests.chaos.plan import ROLES

DEMO = Path(__file__).parents[2] / "infra" / "examples" / "demo.toml"
TOPICS = (STEPS, TRAJECTORIES, DEAD_LETTERS, WORKER_EVENTS)
WORK = ("samples", "evaluation_samples", "server_starts")  # counters of work that is done
GOODBYES = ("draining", "stopped")


class KillEvery:
    """A `FaultHook`: SIGKILL to each role in turn."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._roles = seconds, cycle(ROLES)
        self._next_s = 0.0
        self.killed: list[str] = []

    def enter(self, targets: FaultTargets) -> None:
        """See `FaultHook`."""
        self._targets, self._next_s = targets, time.monotonic() + self._seconds

    def tick(self, *, is_running: bool) -> None:
        """See `FaultHook`."""
        fleet = self._targets.fleet
        if not is_running or time.monotonic() < self._next_s:
            return
        role = next(self._roles)
        worker = fleet.of(role)[0]
        if fleet.kill(worker):
            self._targets.watcher.killed(worker.name)
            self.killed.append(role)
        self._next_s += self._seconds

    def conclude(self, bus: Bus, ended: EndedRun, status: int) -> int:
        """See `FaultHook`."""
        return status


def by_hand(events: Iterable[Event]) -> dict[str, Any]:
    """The figures of `report`, from the records alone: `steps` first, each topic in its order."""
    epoch, target, steps = 0, 0, list[StepCompleted]()
    dropped, dead = dict[str, str](), set[tuple[str, int]]()
    answers: dict[tuple[str, int], Trajectory] = {}
    reports: defaultdict[str, dict[str, list[WorkerReport]]] = defaultdict(dict)
    for event in events:
        match event:
            case TrainerStarted():
                epoch, target = event.epoch, event.step_target
            case StepCompleted() if event.epoch == epoch and event.step == len(steps) + 1:
                steps.append(event)
            case GroupsDropped() if event.epoch == epoch:
                dropped |= {group.group_id: group.reason for group in event.groups}
            case DeadLetter():
                dead.add((event.group_id, event.sample))
            case Trajectory():
                answers.setdefault((event.group_id, event.sample), event)
            case WorkerReport():
                reports[event.worker].setdefault(event.instance, []).append(event)
    spent = _untrained(answers, steps, dropped, dead)
    lives = [own for of_worker in reports.values() for own in of_worker.values()]
    sampled = _of_processes(reports.values(), spent)
    end_ms = steps[-1].finished_at_ms
    if len(steps) < target:  # it was drained before: up to the last that anybody said
        end_ms = max([end_ms, *(own[-1].at_ms for own in lives)])
    return {
        "steps": len(steps),
        "training_s": sum(one.finished_at_ms - one.started_at_ms for one in steps) / 1000,
        "wall_s": (end_ms - steps[0].started_at_ms) / 1000,
        "sampled_tokens": int(sampled),
        "in_vain": {cause: int(num) for cause, num in sorted(spent.items()) if num > 0},
        "seconds_away": _away(reports.values(), _first_work(steps, answers.values(), lives)),
    }


def _of_processes(workers: Iterable[dict[str, list[WorkerReport]]], spent: Counter[str]) -> float:
    """Tokens that rollout processes counted; `spent` is told what they had not finished."""
    sampled = 0.0
    for lives in workers:
        newest = list(lives)[-1]
        for instance, own in lives.items():
            end = own[-1]
            if end.role != "rollout":
                continue
            sampled += end.counters.get("sampled_tokens", 0)
            lost = end.counters.get("sampled_tokens", 0) - end.counters.get("tokens", 0)
            if end.state == "stopped":
                spent["unfinished"] += int(lost)
            elif instance != newest and end.state not in GOODBYES:
                spent["died"] += int(lost)
    return sampled


def _untrained(
    answers: dict[tuple[str, int], Trajectory],
    steps: list[StepCompleted],
    dropped: dict[str, str],
    dead: set[tuple[str, int]],
) -> Counter[str]:
    """Tokens of training samples that are over and that no step has, by why."""
    trained = {(ref.group_id, ref.sample) for step in steps for ref in step.samples}
    begun = {group for group, _ in trained}
    found: Counter[str] = Counter()
    for name, event in answers.items():
        why = "dead_letter" if name in dead else "left_out" if name[0] in begun else ""
        why = why or dropped.get(name[0], "")
        if event.purpose == TRAIN and name not in trained and why:
            own = (segment for segment in event.segments if segment.author == "policy")
            found[why] += sum(len(segment.token_ids) for segment in own)
    return found


def _first_work(
    steps: Iterable[StepCompleted], answers: Iterable[Trajectory], lives: list[list[WorkerReport]]
) -> dict[str, int]:
    """When each process had done something: a step, an answer, or a report that counts work."""
    times = [(one.instance, one.finished_at_ms) for one in (*steps, *answers)]
    times += [
        (one.instance, one.at_ms)
        for own in lives
        for one in own
        if any(one.counters.get(name) for name in WORK)
    ]
    first: dict[str, int] = {}
    for instance, at_ms in times:
        first[instance] = min(at_ms, first.get(instance, at_ms))
    return first


def _away(
    workers: Iterable[dict[str, list[WorkerReport]]], first: dict[str, int]
) -> dict[str, list[float]]:
    """By role, of each death: seconds from its last report to the next work of its worker."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for lives in workers:
        names = list(lives)
        for at, name in enumerate(names[:-1]):
            end = lives[name][-1]
            later = [first[other] for other in names[at + 1 :] if other in first]
            if end.state not in GOODBYES and later:
                found[end.role].append((min(later) - end.at_ms) / 1000)
    return {role: found[role] for role in sorted(found)}


def by_command(log: RunLog) -> tuple[dict[str, Any], list[str]]:
    """The same by the folds that every command asks, and the lines that `report` shows."""
    views = Views()
    for topic in TOPICS:
        for record in log.read_topic(topic):
            views.apply(record.event, record.position)
    cost = views.state.cost
    away = defaultdict(list)
    for death in cost.deaths:
        if death.seconds is not None:
            away[death.role].append(death.seconds)
    figures = {
        "steps": views.state.run.step,
        "training_s": cost.training_s,
        "wall_s": cost.wall_s,
        "sampled_tokens": cost.sampled_tokens,
        "in_vain": dict(sorted(cost.in_vain.items())),
        "seconds_away": {role: away[role] for role in sorted(away)},
    }
    return figures, [f"{one.value} {one.name}" for one in of_cost(views.state)]


def told_by_hand(found: dict[str, Any]) -> Iterator[str]:
    """The values that `report` has to show."""
    yield f"{100 * found['training_s'] / found['wall_s']:.1f} %"
    if found["in_vain"]:
        yield f"{100 * sum(found['in_vain'].values()) / found['sampled_tokens']:.1f} %"
    for seconds in found["seconds_away"].values():
        yield f"{median(seconds):.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=DEMO)
    parser.add_argument("--every", type=float, default=45.0, help="seconds between two kills")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--read", action="store_true", help="make no run: that of --dir is over")
    parser.add_argument("--json", type=Path, default=Path("cost.json"))
    args = parser.parse_args()
    found = {"hardware": hardware()} if args.read else made(args)
    found |= compared(args.dir)
    args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join([*found["told"], f"equal by hand: {found['is_equal']}"]))  # noqa: T201
    return 0 if found["is_equal"] and not found.get("status") else 1


def made(args: argparse.Namespace) -> dict[str, Any]:
    """A run with its kills; drained by Ctrl-C, if it takes too long."""
    changes = [f"run.dir={args.dir}", "demo.kills=[]", f"trainer.steps={args.steps}"]
    load_before, hook = os.getloadavg()[0], KillEvery(args.every)
    config = load([args.config], changes)
    options = UpOptions(config=config, command="up", is_resumed=False, is_live=False)
    status = up(options, hook)
    return {
        "hardware": hardware(),
        "load_before": round(load_before, 1),  # that of `hardware` is behind it
        "every_s": args.every,
        "killed": hook.killed,
        "status": status,
    }


def compared(folder: Path) -> dict[str, Any]:
    """Both sets of figures, and whether `report` shows those of the hand."""
    with opened([str(folder)], []) as run:
        hand = by_hand(record.event for topic in TOPICS for record in run.log.read_topic(topic))
        command, lines = by_command(run.log)
    assert rlstreams(["report", str(folder)]) == 0
    page = html.unescape((folder / "report.html").read_text(encoding="utf-8"))
    missing = [told for told in told_by_hand(hand) if told not in page]
    return {
        "by_hand": hand,
        "by_command": command,
        "told": lines,
        "missing_in_report": missing,
        "is_equal": hand == command and not missing,
    }


if __name__ == "__main__":
    raise SystemExit(main())
