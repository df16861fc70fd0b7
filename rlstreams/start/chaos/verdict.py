"""From the journal and the log to the report of a run under faults, as text and as JSON.

Pure but for `read_outputs` and `machine`: all that was seen is passed in.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlstreams.schemas.events import (
    Event,
    PolicyLoaded,
    Prompt,
    ScoredTrajectory,
    StepCompleted,
    Trajectory,
)
from rlstreams.start.chaos.plan import BROKER, RECORDS, SERVER, UP, FaultKind, Injection, Journal
from rlstreams.streams.audit.report import AuditReport, BreachKind
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.text import plain_json
from rlstreams.streams.log.topics import POLICY_PULLS, PROMPTS, SCORED, STEPS, TRAJECTORIES
from rlstreams.streams.run.run_log import BusLog
from rlstreams.streams.views.run import RunState
from rlstreams.up.supervisor.restart import OWNER_S, Exited, described
from rlstreams.workers.loop.runtime import Exit

TOPICS = (PROMPTS, TRAJECTORIES, SCORED, STEPS, POLICY_PULLS)
LOADS = " loads"  # behind the name of a worker: the versions that it pulled


@dataclass
class Outputs:
    """Folds the topics of samples and steps. Times are those at which records were handed over."""

    _times: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    _at_ms: int = 0  # of the newest event

    def __post_init__(self) -> None:
        self._ledger = Ledger(begins_anywhere=True, on_step=self._step)

    def apply(self, event: Event, at_ms: int) -> None:
        """Take one event that was handed to the client at `at_ms`."""
        self._at_ms = at_ms
        if isinstance(event, Prompt):
            self._times["prompts-0"].append((at_ms, ""))
        elif isinstance(event, Trajectory | ScoredTrajectory):
            self._times[event.worker].append((at_ms, event.instance))
        elif isinstance(event, PolicyLoaded):
            self._times[f"{event.worker}{LOADS}"].append((at_ms, event.instance))
        else:
            self._ledger.apply(event)

    def _step(self, event: StepCompleted, _: Position) -> None:
        self._times["trainer-0"].append((self._at_ms, event.instance))

    def next_ms(self, worker: str, after_ms: int, not_by: str = "") -> int | None:
        """When `worker` first committed something after `after_ms`, by another process than
        `not_by`; None if it never did."""
        found = (
            at_ms
            for at_ms, instance in self._times.get(worker, ())
            if at_ms >= after_ms and (not not_by or instance != not_by)
        )
        return min(found, default=None)

    def next_of_rollout(self, after_ms: int) -> int | None:
        """When any rollout worker first committed something after `after_ms`."""
        names = [n for n in self._times if n.startswith("rollout-") and not n.endswith(LOADS)]
        found = (self.next_ms(name, after_ms) for name in names)
        return min((at_ms for at_ms in found if at_ms is not None), default=None)


def read_outputs(bus: Bus) -> Outputs:
    """All that the topics hold now; what cannot be read, the audit counts.

    Raises:
        DeadlineError: a topic did not deliver up to its end.
    """
    outputs, log = Outputs(), BusLog(bus, "chaos")
    for topic in TOPICS:
        for record in log.read_topic(topic, skip_unreadable=True):
            outputs.apply(record.event, record.raw.timestamp_ms)
    return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Times of one kind, seconds."""

    count: int
    median_s: float
    worst_s: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(
            count=len(values),
            median_s=round(statistics.median(values), 2),
            worst_s=round(max(values), 2),
        )

    def __str__(self) -> str:
        """Median, worst and how many."""
        return f"{self.median_s:.1f} s, worst {self.worst_s:.1f} s (of {self.count})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Zombies:
    """Processes that slept while a successor took over, and woke up."""

    woken: int = 0
    fenced: int = 0  # ended by themselves with status 75
    ended_otherwise: Mapping[str, int] = field(default_factory=dict)  # by status
    alive: int = 0  # had not noticed long after they woke up


@dataclass(frozen=True, slots=True, kw_only=True)
class Redone:
    """What restarted trainers executed again."""

    times: int = 0
    steps: int = 0
    equal: int = 0  # with the recorded weight hash


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """Everything; `problems` is empty if the run kept its promises under all faults asked for."""

    run: str
    seed: int
    machine: Mapping[str, object]
    seconds: float
    faults_asked: int
    faults: Mapping[str, Mapping[str, int]]  # by role, by kind
    processes_killed: int  # crash points and the broker included
    crash_points: Mapping[str, int]  # reached, by name
    outcome: str
    steps: int
    step_target: int
    audit: Mapping[str, object]
    audit_line: str
    redone: Redone
    recovery: Mapping[str, Spread]  # from the death to the next committed work, by role
    zombies: Zombies
    unexplained: Sequence[str]  # ends that no fault accounts for
    problems: Sequence[str]

    @property
    def ok(self) -> bool:
        """Nothing broke."""
        return not self.problems

    @property
    def num_faults(self) -> int:
        """Faults that happened."""
        return sum(sum(kinds.values()) for kinds in self.faults.values())

    def to_json(self) -> str:
        """All of it as one JSON object."""
        return plain_json({"ok": self.ok, **asdict(self)}, indent=2, sort_keys=True)

    def lines(self) -> Sequence[str]:
        """For people."""
        redone, zombies = self.redone, self.zombies
        points, others = _counts(self.crash_points), _counts(zombies.ended_otherwise)
        return (
            f"chaos, seed {self.seed}: {self.num_faults} of {self.faults_asked} faults in "
            f"{self.seconds:.0f} s, {self.processes_killed} processes killed",
            *(f"  {role:<8} {_counts(kinds)}" for role, kinds in self.faults.items()),
            *([f"  crash points reached: {points}"] if points else []),
            f"steps {self.steps} of {self.step_target}; {redone.steps} done again from the log in "
            f"{redone.times} restarts of the trainer, {redone.equal} weight hashes equal",
            self.audit_line,
            *(["from a kill to the next committed work, median:"] if self.recovery else []),
            *(f"  {role:<8} {spread}" for role, spread in self.recovery.items()),
            f"zombies woken {zombies.woken}: fenced {zombies.fenced}, ended otherwise "
            f"{others or 0}, alive {zombies.alive}",
            *(f"unexplained: {line}" for line in self.unexplained),
            *(f"PROBLEM: {problem}" for problem in self.problems),
            f"chaos: {'nothing broke' if self.ok else 'not what was promised'}",
        )


def machine() -> dict[str, object]:
    """What the numbers were taken on."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (info.read_text("utf-8").splitlines() if info.is_file() else ())
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count() or 0,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


# A woken zombie that lives longer has not noticed. It may sit in a commit (`deadlines.commit_s`,
# 30 s), and a broker that was killed meanwhile cannot tell it who owns its id (43 s at worst).
ZOMBIE_END_S = 90.0
NOT_AUDITED = "not audited: a replay wrote its steps"
_DEATHS = (
    FaultKind.KILL, FaultKind.POINT, FaultKind.AGAIN, FaultKind.SEVERAL, FaultKind.ZOMBIE,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservations:
    """Everything that is known of a run that is over."""

    run: str
    seed: int
    machine: Mapping[str, object]
    seconds: float
    now_s: float  # monotonic, as the journal's times
    journal: Journal
    exits: Sequence[Exited]
    num_killed: int  # workers
    outputs: Outputs
    state: RunState
    audit: AuditReport | None  # None: a replay wrote its steps
    outcome: str
    is_complete: bool
    failure: str


def report(observed: RunObservations) -> ChaosReport:
    """The report of a run that is over."""
    injections, audit = observed.journal.injections, observed.audit
    reached = Counter(e.died_at.partition(":")[0] for e in observed.exits if e.died_at)
    zombies = _zombies(observed)
    redone = Redone(
        times=len(observed.state.redone),
        steps=sum(r.last_step - r.first_step + 1 for r in observed.state.redone),
        equal=sum(r.num_equal for r in observed.state.redone),
    )
    return ChaosReport(
        run=observed.run,
        seed=observed.seed,
        machine=observed.machine,
        seconds=round(observed.seconds, 1),
        faults_asked=len(observed.journal.planned),
        faults=_by_role(injections),
        processes_killed=observed.num_killed
        + len(observed.journal.broker_kills_s)
        + sum(injection.fault.role == SERVER for injection in injections),
        crash_points=dict(sorted(reached.items())),
        outcome=observed.outcome,
        steps=observed.state.step,
        step_target=observed.state.step_target,
        audit={} if audit is None else {"ok": audit.ok, **asdict(audit)},
        audit_line=NOT_AUDITED if audit is None else audit.line(),
        redone=redone,
        recovery=_recovery(observed),
        zombies=zombies,
        unexplained=tuple(
            f"{e.worker} {described(e.status)}"
            for e in observed.exits
            if not e.excuse and e.status != Exit.DONE and not _is_aftermath(e, injections)
        ),
        problems=tuple(_problems(observed, zombies, redone)),
    )


def _is_aftermath(exited: Exited, injections: Sequence[Injection]) -> bool:
    """Whether a process ended because of a fault that struck something else: a trainer while that
    of an `up` that was killed still drains, anybody while the disk had no room."""
    for injection in injections:
        age_s = exited.seen_s - injection.at_s
        is_disk = injection.fault.kind is FaultKind.FULL
        is_drain = injection.fault.role == UP and exited.status == Exit.OWNER_ALIVE
        if (is_disk or is_drain) and 0 < age_s < injection.fault.stop_s + OWNER_S:
            return True
    return False


def _by_role(injections: Sequence[Injection]) -> dict[str, dict[str, int]]:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for injection in injections:
        counts[injection.fault.role][injection.fault.kind] += 1
    return {role: dict(sorted(counts[role].items())) for role in sorted(counts)}


def _deaths(observed: RunObservations) -> Iterator[tuple[str, str, int]]:
    """Victim, its instance, and when it died or fell asleep for good, on the log's clock."""
    injections = observed.journal.injections
    for injection in injections:
        if injection.fault.kind in _DEATHS:
            yield injection.fault.victim, injection.instance, injection.at_ms
    clock_ms = injections[0].at_ms - 1000 * injections[0].at_s if injections else 0.0
    for exited in observed.exits:
        if exited.died_at:
            yield exited.worker, exited.instance, round(1000 * exited.seen_s + clock_ms)


def _recovery(observed: RunObservations) -> dict[str, Spread]:
    """Of a broker and of `up` until anybody samples again; without what never came back."""
    times_s: defaultdict[str, list[float]] = defaultdict(list)
    for victim, instance, died_ms in _deaths(observed):
        role = victim.partition("-")[0]
        if victim in (BROKER, UP):
            back_ms = observed.outputs.next_of_rollout(died_ms)
        elif role == SERVER:
            worker = victim.replace(SERVER, "rollout")
            back_ms = observed.outputs.next_ms(f"{worker}{LOADS}", died_ms)
        else:
            back_ms = observed.outputs.next_ms(victim, died_ms, not_by=instance)
        if back_ms is not None:
            times_s[role].append((back_ms - died_ms) / 1000)
    return {role: Spread.of(values) for role, values in sorted(times_s.items())}


def _zombies(observed: RunObservations) -> Zombies:
    woken_s = observed.journal.woken_s
    zombies = [s.instance for s in observed.journal.injections if s.fault.kind is FaultKind.ZOMBIE]
    exits = {e.instance: e for e in observed.exits if e.was_replaced}
    ended = [exits[instance] for instance in zombies if instance in exits]
    others = Counter(described(e.status) for e in ended if e.status != Exit.FENCED)
    lived_s = [
        (exits[one].seen_s if one in exits else observed.now_s) - woken_s[one]
        for one in zombies
        if one in woken_s
    ]
    return Zombies(
        woken=len(lived_s),
        fenced=sum(e.status == Exit.FENCED for e in ended),
        ended_otherwise=dict(sorted(others.items())),
        alive=sum(seconds > ZOMBIE_END_S for seconds in lived_s),
    )


def _problems(observed: RunObservations, zombies: Zombies, redone: Redone) -> list[str]:
    asked, struck = len(observed.journal.planned), len(observed.journal.injections)
    found = [observed.failure] if observed.failure else []
    if observed.audit is None:
        found.append(NOT_AUDITED)
    breaches = set(observed.audit.breach_counts) if observed.audit else set[str]()
    if any(injection.fault.role == RECORDS for injection in observed.journal.injections):
        breaches.discard(BreachKind.UNREADABLE_STEP)  # that is what we wrote
    if (breaches or not observed.is_complete) and not observed.failure:
        told = ", ".join(sorted(breaches)) or "nothing"
        found.append(f"the run is {observed.outcome}, its audit found {told}")
    if struck < asked:
        found.append(
            f"only {struck} of {asked} faults were possible before the run ended: "
            "ask for more --steps, or a smaller --every"
        )
    if zombies.alive:
        found.append(f"{zombies.alive} zombies still lived {ZOMBIE_END_S:g} s after they woke up")
    if redone.equal < redone.steps:
        found.append(f"{redone.steps - redone.equal} redone steps gave other weights")
    return found
