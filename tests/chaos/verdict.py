"""From the journal and the audit to the report of a run under faults, as text and as JSON. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rlstreams.streams.audit.report import BreachKind
from rlstreams.streams.log.text import plain_json
from rlstreams.streams.views.run import RunState
from rlstreams.up.supervisor.fault_hook import EndedRun, RunOutcome
from rlstreams.up.supervisor.restart import Exited, described
from rlstreams.workers.loop.runtime import Exit
from tests.chaos.plan import AGENTS, BROKER, RECORDS, FaultKind, Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """Everything; `problems` is empty if the run kept its promises under all faults asked for."""

    run: str
    seed: int
    seconds: float
    faults_asked: int
    faults: Mapping[str, Mapping[str, int]]  # by role, by kind
    processes_killed: int  # crash points, the broker and agents included
    crash_points: Mapping[str, int]  # reached, by name
    outcome: str
    steps: int
    step_target: int
    audit: Mapping[str, object]
    redone: Mapping[str, int]  # by restarted trainers: times, steps, equal (with the logged hash)
    # Processes that slept while a successor took over: woken, fenced (status 75), ended_otherwise,
    # alive (had not noticed long after they woke up).
    zombies: Mapping[str, int]
    unexplained: Sequence[str]  # ends that no fault accounts for
    problems: Sequence[str]

    @property
    def ok(self) -> bool:
        """Nothing broke."""
        return not self.problems

    def to_json(self) -> str:
        """All of it as one JSON object."""
        return plain_json({"ok": self.ok, **asdict(self)}, indent=2, sort_keys=True)

    def lines(self) -> Sequence[str]:
        """For people; what `up` said of steps and samples is not said again."""
        points = _counts(self.crash_points)
        num_faults = sum(sum(kinds.values()) for kinds in self.faults.values())
        return (
            f"chaos, seed {self.seed}: {num_faults} of {self.faults_asked} faults in "
            f"{self.seconds:.0f} s, {self.processes_killed} processes killed",
            *(f"  {role:<8} {_counts(kinds)}" for role, kinds in self.faults.items()),
            *([f"  crash points reached: {points}"] if points else []),
            f"steps done again from the log: {_counts(self.redone)}",
            f"zombies: {_counts(self.zombies)}",
            *(f"unexplained: {line}" for line in self.unexplained),
            *(f"PROBLEM: {problem}" for problem in self.problems),
            f"chaos: {'nothing broke' if self.ok else 'not what was promised'}",
        )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


# A woken zombie that lives longer has not noticed. It may sit in a commit (`deadlines.commit_s`,
# 30 s), and a broker that was killed meanwhile cannot tell it who owns its id (43 s at worst).
ZOMBIE_END_S = 90.0
NOT_AUDITED = "not audited: a replay wrote its steps"


def report(
    journal: Journal, ended: EndedRun, state: RunState, exits: Sequence[Exited], now_s: float
) -> ChaosReport:
    """The report of a run that is over.

    Args:
        exits: all ends of processes that were seen.
        now_s: monotonic, as the journal's times.
    """
    injections, audit = journal.injections, ended.audit
    faults: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for injection in injections:
        faults[injection.fault.role][injection.fault.kind] += 1
    reached = Counter(e.died_at.partition(":")[0] for e in exits if e.died_at)
    zombies = _zombies(journal, exits, now_s)
    redone = {
        "times": len(state.redone),
        "steps": sum(r.last_step - r.first_step + 1 for r in state.redone),
        "equal": sum(r.num_equal for r in state.redone),
    }
    return ChaosReport(
        run=ended.options.config.run.id,
        seed=journal.seed,
        seconds=round(now_s - journal.started_s, 1),
        faults_asked=len(journal.planned),
        faults={role: dict(sorted(faults[role].items())) for role in sorted(faults)},
        processes_killed=ended.num_killed
        + sum(faults[role][FaultKind.KILL] for role in (AGENTS, BROKER)),
        crash_points=dict(sorted(reached.items())),
        outcome=ended.outcome,
        steps=state.step,
        step_target=state.step_target,
        audit={} if audit is None else {"ok": audit.ok, **asdict(audit)},
        redone=redone,
        zombies=zombies,
        unexplained=tuple(
            f"{e.worker} {described(e.status)}"
            for e in exits
            if not e.excuse and e.status != Exit.DONE
        ),
        problems=tuple(_problems(journal, ended, zombies, redone)),
    )


def _zombies(journal: Journal, exits: Sequence[Exited], now_s: float) -> dict[str, int]:
    zombies = [s.instance for s in journal.injections if s.fault.kind is FaultKind.ZOMBIE]
    ends = {e.instance: e for e in exits if e.was_replaced}
    ended = [ends[instance] for instance in zombies if instance in ends]
    fenced = sum(e.status == Exit.FENCED for e in ended)
    lived_s = [
        (ends[one].seen_s if one in ends else now_s) - journal.woken_s[one]
        for one in zombies
        if one in journal.woken_s
    ]
    return {
        "woken": len(lived_s),
        "fenced": fenced,
        "ended_otherwise": len(ended) - fenced,
        "alive": sum(seconds > ZOMBIE_END_S for seconds in lived_s),
    }


def _problems(
    journal: Journal, ended: EndedRun, zombies: Mapping[str, int], redone: Mapping[str, int]
) -> Iterator[str]:
    asked, struck = len(journal.planned), len(journal.injections)
    failure, audit = ended.failure, ended.audit
    if failure is not None:
        yield f"{failure.worker} {failure.reason}".strip()
    if audit is None:
        yield NOT_AUDITED
    breaches = set(audit.breach_counts) if audit else set[str]()
    if any(injection.fault.role == RECORDS for injection in journal.injections):
        breaches.discard(BreachKind.UNREADABLE_STEP)  # that is what we wrote
    if (breaches or ended.outcome is not RunOutcome.COMPLETE) and failure is None:
        told = ", ".join(sorted(breaches)) or "nothing"
        yield f"the run is {ended.outcome}, its audit found {told}"
    if struck < asked:
        yield (
            f"only {struck} of {asked} faults were possible before the run ended: "
            "ask for more --steps, or a smaller --every"
        )
    if zombies["alive"]:
        yield f"{zombies['alive']} zombies still lived {ZOMBIE_END_S:g} s after they woke up"
    if redone["equal"] < redone["steps"]:
        yield f"{redone['steps'] - redone['equal']} redone steps gave other weights"
