"""From the journal and the log to the report: pure, all that was seen is passed in."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rlstreams.start.chaos.journal import Injection, Journal
from rlstreams.start.chaos.outputs import LOADS, Outputs
from rlstreams.start.chaos.plan import BROKER, RECORDS, SERVER, UP, FaultKind
from rlstreams.start.chaos.report import ChaosReport, Redone, Spread, Zombies
from rlstreams.streams.audit.report import AuditReport, BreachKind
from rlstreams.streams.views.run import RunState
from rlstreams.up.supervisor.fleet import Exited
from rlstreams.up.supervisor.restart import OWNER_S, described
from rlstreams.workers.loop.runtime import Exit

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
