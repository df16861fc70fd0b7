"""Input and wording that live view and report share: answers spelled out, times, marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rlstreams.schemas.events import StepsRedone
from rlstreams.streams.log.text import counted
from rlstreams.streams.views.evaluation import EvaluationPoint, HeldOutAnswer
from rlstreams.streams.views.feed import ViewState
from rlstreams.streams.views.workers import WorkerView

REDONE_LINES = 3
# C0 without tab and newline, delete, and C1: ESC [ 2 J would clear the screen.
_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class KillMark:
    """A process that ended without a final report while this step was being made."""

    step: int
    worker: str
    killed_at_ms: int = 0  # time at which `up` itself killed it; 0: it ended for its own reason

    def __str__(self) -> str:
        """Return `rollout-0 killed`; or `rollout-0 restarted`, if `up` did not kill it."""
        return f"{self.worker} {'killed' if self.killed_at_ms else 'restarted'}"


def ends(marks: Sequence[KillMark]) -> str:
    """Return one word for all marks: `killed` if `up` killed every one, else `restarted`."""
    return "killed" if all(mark.killed_at_ms for mark in marks) else "restarted"


def spell(token_ids: Sequence[int]) -> str:
    """Return tokens as numbers, for a run without a tokenizer."""
    return " ".join(str(token) for token in token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """One child process of the supervisor."""

    worker: str
    role: str
    pid: int | None
    is_alive: bool
    restarts: int = 0
    instance: str = ""  # of the process; empty while there is none
    started_s: float | None = None  # monotonic; None: no process, and none is about to start


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveInput:
    """Everything that a screen shows of a run."""

    run: str
    views: ViewState
    elapsed_s: float
    step_target: int = 0  # used until the trainer's claim names its own
    processes: Sequence[ProcessInfo] = ()
    kills: Sequence[KillMark] = ()
    message: str = ""  # the newest event, e.g. a kill
    state: str = "running"  # "starting", "running", "draining", ...

    @property
    def workers(self) -> dict[str, WorkerView]:
        """Workers by name, without those that left: reported as stopped, and without a process."""
        processes = {process.worker for process in self.processes}
        return {
            worker.worker: worker
            for worker in self.views.throughput.workers
            if not processes or worker.worker in processes or worker.state != "stopped"
        }

    @property
    def target(self) -> int:
        """Steps to do; 0 while that is not known."""
        return self.views.run.step_target or self.step_target


def visible(text: str) -> str:
    """Return text of a model or of a data set, with control characters as Python escapes them."""
    return _STEERS.sub(lambda found: repr(found[0])[1:-1], text)


def spelled(
    answer: HeldOutAnswer, decode: Callable[[Sequence[int]], str]
) -> Iterator[tuple[int, str]]:
    """Yield (policy version, text) of each run; decoded together, so that the pieces join."""
    ids: tuple[int, ...] = ()
    done = ""
    for run in answer.runs:
        ids += run.token_ids
        whole = decode(ids)
        yield run.policy_version, whole[len(done) :]
        done = whole


def over(*points: EvaluationPoint) -> str:
    """Return the number of answers that these accuracies are over: `over 256 answers each`."""
    counts = [point.num_samples for point in points]
    first = f"over {counted(counts[0], 'answer')}"
    if len(counts) == 1:
        return first
    is_same = len(set(counts)) == 1
    return f"{first} each" if is_same else f"{first} and {', '.join(f'{n:,}' for n in counts[1:])}"


def clock(seconds: float) -> str:
    """`0:42`, `12:07`, `1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def clock_text(at_ms: int) -> str:
    """`14:03:07.250`, UTC."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%H:%M:%S.%f}"[:-3]


def waits(given: LiveInput) -> str:
    """Return the state of each process that is not working: `rollout-0 starting: loads weights`."""
    reported = given.workers
    alive = {process.worker: process.is_alive for process in given.processes}
    found = []
    for name in sorted(reported.keys() | alive.keys()):
        worker = reported.get(name)
        state = "starting" if worker is None else doing(worker.state, worker.detail)
        if not alive.get(name, True):
            state = "ended" if given.state in ENDING else "down"
        if state not in ("working", "training", "stopped", "ended"):
            found.append(f"{name} {state}")
    return "; ".join(found)


ENDING = ("saving", "finishing", "draining")  # states of the run in which a process may end


def doing(state: str, detail: str) -> str:
    """`waiting for trajectories`, `pulling: policy version 7`."""
    between = " " if not detail or detail.startswith("for ") else ": "
    return f"{state}{between}{visible(detail)}".strip()


def redone_lines(redone: Sequence[StepsRedone]) -> list[str]:
    """Return the steps that restarted trainers redid, a line each (more than a few: one line for
    all), and the checkpoints that they passed over."""
    done = [one for one in redone if one.last_step >= one.first_step]
    if len(done) > REDONE_LINES:
        num_steps = sum(one.last_step - one.first_step + 1 for one in done)
        num_equal = sum(one.num_equal for one in done)
        lines = [
            f"{len(done)} times steps were done again from the log: "
            f"{num_equal:,} of {num_steps:,} weight hashes equal"
        ]
    else:
        lines = [
            f"steps {one.first_step} to {one.last_step} were done again from the log: "
            f"{one.num_equal} of {one.last_step - one.first_step + 1} weight hashes equal"
            for one in done
        ]
    return [*lines, *passed_over_lines(redone)]


def passed_over_lines(redone: Sequence[StepsRedone]) -> list[str]:
    """Return checkpoints that restarted trainers passed over, a line each, the newest last."""
    # One checkpoint is passed over at every restart, until newer ones push it out.
    every = dict.fromkeys((it.checkpoint, it.reason) for one in redone for it in one.passed_over)
    lines = [f"checkpoint {name} was passed over at a restart: {why}" for name, why in every]
    if len(lines) <= REDONE_LINES:
        return lines
    num_left = len(lines) - REDONE_LINES
    return [f"{num_left} other checkpoints were passed over at restarts", *lines[-REDONE_LINES:]]


def number(value: float) -> str:
    """Return a value in few digits: `0.25`, `1,200`, `2e-04`."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.0e}"
    return f"{value:.3g}"
