"""From the journal and the log to the report: pure, all that was seen is passed in."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlstreams.start.chaos.journal import Injection, Journal
from rlstreams.start.chaos.outputs import Outputs
from rlstreams.start.chaos.plan import BROKER, RECORDS, SERVER, UP, Fault, FaultKind
from rlstreams.start.chaos.report import ChaosReport, Redone, Spread, Zombies
from rlstreams.streams.audit.report import AuditReport, BreachKind
from rlstreams.streams.views.run import RunState
from rlstreams.up.supervisor.fleet import Exited
from rlstreams.up.supervisor.restart import OWNER_S, described
from rlstreams.workers.loop.runtime import Exit

# A woken zombie that lives longer has not noticed: one that slept within a commit gives that up
# after `deadlines.commit_s`, 30 s. Time in which the broker was struck down does not count:
# nobody else can tell a zombie who owns its id by now.
ZOMBIE_END_S = 38.0
_KILLS = (FaultKind.KILL, FaultKind.POINT, FaultKind.AGAIN, FaultKind.SEVERAL)
_DEATHS = (*_KILLS, FaultKind.ZOMBIE)


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
    audit: AuditReport
    outcome: str
    is_complete: bool
    failure: str
    recomputed: str = ""
    has_recompute_failed: bool = False


def report(observed: RunObservations) -> ChaosReport:
    """The report of a run that is over."""
    injections = observed.journal.injections
    reached = Counter(e.died_at.partition(":")[0] for e in observed.exits if e.died_at)
    tokens = observed.outputs.tokens(_rollout_deaths_ms(observed))
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
        + len(observed.journal.broker_deaths_s)
        + sum(injection.fault.role == SERVER for injection in injections),
        crash_points=dict(sorted(reached.items())),
        crash_points_armed=sum(bool(fault.crash_at) for fault in _armed(observed.journal)),
        outcome=observed.outcome,
        steps=observed.state.step,
        step_target=observed.state.step_target,
        audit=_audited(observed.audit),
        audit_line=observed.audit.line(),
        stale=observed.audit.breach_counts.get(BreachKind.TOO_STALE.value, 0),
        redone=redone,
        sampled_tokens=tokens.sampled,
        unreported_tokens=tokens.unreported,
        useful_tokens=tokens.useful,
        regenerated_share=round(tokens.regenerated_share, 4),
        back=_back(observed),
        recovery=_recovery(observed),
        woken=_woken(observed),
        detection=_detection(observed),
        zombies=zombies,
        exits=_exits(observed.exits),
        unexplained=tuple(
            f"{e.worker} {described(e.status)}"
            for e in observed.exits
            if not e.excuse and e.status != Exit.DONE and not _is_aftermath(e, injections)
        ),
        recomputed=observed.recomputed,
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


def _armed(journal: Journal) -> Sequence[Fault]:
    """Crash points that were struck, and all that were armed from the start."""
    struck = [
        injection.fault
        for injection in journal.injections
        if injection.fault.kind is FaultKind.POINT
    ]
    return [*struck, *(fault for fault in journal.planned if fault.kind is FaultKind.ARMED)]


def _by_role(injections: Sequence[Injection]) -> dict[str, dict[str, int]]:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for injection in injections:
        counts[injection.fault.role][injection.fault.kind] += 1
    return {role: dict(sorted(counts[role].items())) for role in sorted(counts)}


def _audited(audit: AuditReport) -> dict[str, object]:
    return {
        "ok": audit.ok,
        "issued": audit.issued,
        "trained": audit.trained,
        "evaluated": audit.evaluated,
        "dropped": dict(audit.dropped),
        "dead_lettered": audit.dead_lettered,
        "in_flight": dict(audit.in_flight),
        "lost": audit.lost,
        "trained_twice": audit.trained_twice,
        "duplicates": audit.duplicates,
        "void": audit.void,
        "unreadable": audit.unreadable,
        "staleness": {str(k): v for k, v in sorted(audit.staleness.items())},
        "max_staleness": audit.max_staleness,
        "breaches": dict(audit.breach_counts),
    }


def _clock_ms(observed: RunObservations) -> float:
    """What turns monotonic seconds into the log's milliseconds."""
    injections = observed.journal.injections
    return injections[0].at_ms - 1000 * injections[0].at_s if injections else 0.0


def _rollout_deaths_ms(observed: RunObservations) -> dict[str, int]:
    deaths = {
        s.instance: s.at_ms
        for s in observed.journal.injections
        if s.fault.role == "rollout" and s.fault.kind in _DEATHS
    }
    for exited in observed.exits:
        if exited.worker.startswith("rollout-") and exited.status != Exit.DONE:
            deaths.setdefault(exited.instance, round(1000 * exited.seen_s + _clock_ms(observed)))
    return deaths


def _deaths(observed: RunObservations) -> Iterator[tuple[str, str, int]]:
    """Victim, its instance, and when it died or fell asleep for good, on the log's clock."""
    for injection in observed.journal.injections:
        if injection.fault.kind in _DEATHS:
            yield injection.fault.victim, injection.instance, injection.at_ms
    for exited in observed.exits:
        if exited.died_at:
            yield exited.worker, exited.instance, round(1000 * exited.seen_s + _clock_ms(observed))


def _recovery(observed: RunObservations) -> dict[str, Spread]:
    def next_ms(victim: str, instance: str, died_ms: int) -> int | None:
        if victim in (BROKER, UP):
            return observed.outputs.next_of_role("rollout", died_ms)
        if _role(victim) == SERVER:
            return observed.outputs.loaded_ms(victim.replace(SERVER, "rollout"), died_ms)
        return observed.outputs.next_ms(victim, died_ms, not_by=instance)

    return _spreads((_role(one[0]), one[2], next_ms(*one)) for one in _deaths(observed))


def _back(observed: RunObservations) -> dict[str, Spread]:
    return _spreads(
        (_role(victim), died_ms, observed.outputs.back_ms(victim, died_ms, not_by=instance))
        for victim, instance, died_ms in _deaths(observed)
    )


def _role(victim: str) -> str:
    return victim.partition("-")[0]


def _woken(observed: RunObservations) -> dict[str, Spread]:
    stops = {s.instance: s for s in observed.journal.injections if s.fault.kind is FaultKind.STOP}

    def times() -> Iterator[tuple[str, float, float | None]]:
        for wakeup in observed.journal.wakeups:
            if (injection := stops.get(wakeup.instance)) is None:
                continue
            fault, woken_ms = injection.fault, round(1000 * wakeup.at_s + _clock_ms(observed))
            if fault.role == BROKER:
                yield BROKER, woken_ms, observed.outputs.next_of_role("rollout", woken_ms)
            else:
                yield fault.role, woken_ms, observed.outputs.next_ms(fault.victim, woken_ms)

    return _spreads(times())


def _detection(observed: RunObservations) -> dict[str, Spread]:
    seen_s = {e.instance: e.seen_s for e in observed.exits}
    kills = [s for s in observed.journal.injections if s.fault.kind in _KILLS]
    found = [(s.fault.role, s.at_s, seen_s[s.instance]) for s in kills if s.instance in seen_s]
    found += [(BROKER, 0.0, seen) for seen in observed.journal.broker_deaths_s]
    return _spreads((role, 1000 * from_s, 1000 * to_s) for role, from_s, to_s in found)


def _spreads(times_ms: Iterable[tuple[str, float, float | None]]) -> dict[str, Spread]:
    """From and to, by role; without what never came."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for role, from_ms, to_ms in times_ms:
        if to_ms is not None:
            times[role].append((to_ms - from_ms) / 1000)
    return {role: Spread.of(values) for role, values in sorted(times.items())}


def _zombies(observed: RunObservations) -> Zombies:
    woken_s = {w.instance: w.at_s for w in observed.journal.wakeups}
    zombies = [s for s in observed.journal.injections if s.fault.kind is FaultKind.ZOMBIE]
    exits = {e.instance: e for e in observed.exits if e.was_replaced}
    ended = [exits[s.instance] for s in zombies if s.instance in exits]
    others = Counter(described(e.status) for e in ended if e.status != Exit.FENCED)
    lived = [(woken_s.get(e.instance, e.seen_s), e.seen_s) for e in ended]
    return Zombies(
        woken=sum(s.instance in woken_s for s in zombies),
        fenced=sum(e.status == Exit.FENCED for e in ended),
        ended_otherwise=dict(sorted(others.items())),
        alive=sum(
            s.instance not in exits
            and _answered_s(observed, woken_s.get(s.instance, observed.now_s), observed.now_s)
            > ZOMBIE_END_S
            for s in zombies
        ),
        longest_end_s=round(max((end - woken for woken, end in lived), default=0.0), 2),
        longest_answered_s=round(max((_answered_s(observed, *at) for at in lived), default=0.0), 2),
    )


def _answered_s(observed: RunObservations, from_s: float, to_s: float) -> float:
    """Seconds of a stretch of time in which the broker was not struck down."""
    silent_s = sum(outage.within(from_s, to_s) for outage in observed.journal.broker_outages)
    return to_s - from_s - silent_s


def _exits(exits: Sequence[Exited]) -> dict[str, int]:
    counts = Counter(
        f"{_role(e.worker)}: {described(e.status)}" for e in exits if e.status != -signal.SIGKILL
    )
    return dict(sorted(counts.items()))


def _problems(observed: RunObservations, zombies: Zombies, redone: Redone) -> list[str]:
    asked, struck = len(observed.journal.planned), len(observed.journal.injections)
    found = [observed.failure] if observed.failure else []
    breaches = set(observed.audit.breach_counts)
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
    if zombies.longest_answered_s > ZOMBIE_END_S:
        found.append(
            f"a zombie took {zombies.longest_answered_s:.0f} s to end while the broker was up"
        )
    if redone.equal < redone.steps:
        found.append(f"{redone.steps - redone.equal} redone steps gave other weights")
    if observed.has_recompute_failed:
        found.append(observed.recomputed)
    return found
