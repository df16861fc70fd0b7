"""Report of an audit: counts of samples by class, and the guarantees that the log breaks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import islice

from rlstreams.schemas.events import StepsRedone
from rlstreams.streams.log.text import by_number, counted

EXAMPLES_PER_KIND = 20


class BreachKind(StrEnum):
    """Kinds of breach. In brackets the guarantee that each breaks (decision 0009):

    G1 no finished sample is lost. G2 no sample is trained twice. G3 a step can be re-executed.
    G4 staleness is bounded. G5 nothing is sampled before real weights are loaded. G6 a zombie
    changes nothing.
    """

    LOST = "lost"  # [G1] an issued sample that is nowhere
    MISSING_GROUP = "missing group"  # [G1] group numbers have a gap
    MISSING_SAMPLE = "missing sample"  # [G1] a group was issued in part
    NEVER_ISSUED = "never issued"  # [G1] a sample that no prompt started
    TRAINED_TWICE = "trained twice"  # [G2]
    TRAINED_AND_DROPPED = "trained and dropped"  # [G2] a group closes once
    TRAINED_AND_DEAD = "trained and dead-lettered"  # [G1] a sample ends once
    CLOSED_TWICE = "closed twice"  # [G2] a group in two steps, or dropped twice
    CLOSED_SET = "closed set"  # [G2] the recorded set is not what the events closed
    STEP_TWICE = "step twice"  # [G3] two valid records for one step
    UNREADABLE_STEP = "unreadable step"  # [G1] a record of `steps` that may end samples
    STEP_MISSING = "step missing"  # [G3] step numbers have a gap
    HASH_CHAIN = "hash chain"  # [G3] a step started from other weights than were made before
    VERSION_CHAIN = "version chain"  # [G4] a step made another version than the next one
    VERSION_TWICE = "version twice"  # [G6] one number, two contents
    FALSE_VERSION = "false version"  # [G6] published, but no valid step made it
    UNKNOWN_POSITION = "unknown position"  # [G3] a trained sample's bytes are not where it says
    TOO_STALE = "too stale"  # [G4]
    MISLABELLED = "mislabelled"  # [G4] the recorded oldest version is not that of the tokens
    NO_BOUND = "no bound"  # [G4] a step without a claim that sets max_staleness
    UNPUBLISHED = "unpublished"  # [G6] a worker holds weights that no valid epoch published
    FORGED_STEP = "forged step"  # [G6] an event that the trainer named as its writer disowns
    MIXED_CODE = "mixed code"  # [G3] samples of one group were judged by different code
    FORGED_SCORE = "forged score"  # [G6] not of the trajectory that it names
    UNKNOWN_LOAD = "unknown load"  # [G5] tokens of weights that the worker had not confirmed
    UNOPENED_CALL = "unopened call"  # [G6] a call of a session that nobody opened
    LATE_CALL = "late call"  # [G6] behind the close of its session
    CALL_TWICE = "call twice"  # [G6] one call id, two contents
    BROKEN_CALL = "broken call"  # [G3] its prompt is not its parent's tokens and its new ids
    FORGED_SAMPLE = "forged sample"  # [G3] its tokens are no path of its session
    UNDELIVERED = "undelivered session"  # [G1] judged, and neither sample nor dead letter
    HANGING = "hanging transaction"  # open beyond its timeout: no reader gets past it
    BAD_ID = "bad id"  # neither a group number nor an evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One broken guarantee."""

    kind: BreachKind
    id: str  # group, `group/sample`, or `step n`
    detail: str


class Breaches:
    """Collects breaches: counts all, keeps the first few of each kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.kept: list[Breach] = []

    def add(self, kind: BreachKind, name: str, detail: str) -> None:
        """Note one."""
        self.counts[kind.value] += 1
        if self.counts[kind.value] <= EXAMPLES_PER_KIND:
            self.kept.append(Breach(kind=kind, id=name, detail=detail))

    def has_room(self, kind: BreachKind) -> bool:
        """Whether another one of this kind would be kept."""
        return self.counts[kind.value] < EXAMPLES_PER_KIND

    def add_gaps(
        self, kind: BreachKind, present: Collection[int], begin: int, end: int, detail: str
    ) -> None:
        """Note each number from `begin` below `end` that is not `present`; names the first."""
        num_missing = max(0, end - begin) - sum(begin <= number < end for number in present)
        absent = (number for number in range(begin, end) if number not in present)
        room = EXAMPLES_PER_KIND - self.counts[kind.value]
        for number in islice(absent, max(0, min(room, num_missing))):
            self.add(kind, str(number), detail)
            num_missing -= 1
        if num_missing > 0:
            self.counts[kind.value] += num_missing

    def in_order(self) -> tuple[Breach, ...]:
        """Return those kept by kind, then by id, in whatever order partitions were read."""
        kinds = {kind: number for number, kind in enumerate(BreachKind)}
        return tuple(
            sorted(self.kept, key=lambda one: (kinds[one.kind], by_number(one.id), one.detail))
        )

    def copy(self) -> Breaches:
        """An independent collection with the same content."""
        other = Breaches()
        other.counts.update(self.counts)
        other.kept = list(self.kept)
        return other


class CountedNames:
    """Counts, and keeps the first few names."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []

    def add(self, name: str) -> None:
        """Note one."""
        self.count += 1
        if self.count <= EXAMPLES_PER_KIND:
            self.names.append(name)

    def in_order(self) -> tuple[str, ...]:
        """Return the names, sorted by the numbers in them."""
        return tuple(sorted(self.names, key=by_number))


def redone_text(event: StepsRedone) -> str:
    """Steps that a restarted trainer executed again, and checkpoints that it did not start from."""
    num_steps = event.last_step - event.first_step + 1
    done = (
        f"steps {event.first_step} to {event.last_step} were done again from the log: "
        f"{event.num_equal} of {num_steps} weight hashes equal"
    )
    passed = [
        f"epoch {event.epoch} passed over checkpoint {one.checkpoint}: {one.reason}"
        for one in event.passed_over
    ]
    return "\n".join([*([done] if num_steps else []), *passed])


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The step of another run behind which a branch begins."""

    parent: str
    parent_place: str
    step: int
    weight_hash: str
    steps_id: str  # of the parent's topic `steps`
    compared: str = ""  # result of the comparison with the parent's log; "": not compared

    def text(self) -> str:
        """Return the branch's begin in a sentence."""
        found = f"; {self.compared}" if self.compared else ""
        return f"begins at step {self.step} of run {self.parent}, weights {self.weight_hash}{found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """Counts are samples unless said otherwise; every issued sample is in exactly one class."""

    run: str
    steps: int
    policy_version: int  # version that the last step made; -1 without one
    issued: int
    trained: int
    evaluated: int
    dead_lettered: int
    lost: int
    unread: int = 0  # samples that may have ended in a record of `steps` that cannot be read
    dropped: Mapping[str, int] = field(default_factory=dict)  # by reason
    in_flight: Mapping[str, int] = field(default_factory=dict)  # by the role that has it next
    has_positions: bool = True  # consumer groups' positions are known: they prove samples in flight
    expired: int = 0  # evaluations whose trajectory retention has removed
    trained_twice: int = 0
    staleness: Mapping[int, int] = field(default_factory=dict)  # trained tokens by versions
    max_staleness: int | None = None  # of the newest claim
    masked_segments: int = 0
    redone: tuple[StepsRedone, ...] = ()  # by restarted trainers, from the log
    drifted: int = 0  # redone steps with different weights, which then got a number of their own
    unproven: int = 0  # trained samples whose record retention has removed
    duplicates: int = 0  # later records of a sample or a call that had one; every reader skips them
    named_duplicates: tuple[str, ...] = ()  # the first few of them
    void: int = 0  # events of a superseded epoch
    named_void: tuple[str, ...] = ()  # positions of the first few of them
    unreadable: int = 0  # records that could not be decoded
    named_unreadable: tuple[str, ...] = ()  # positions of the first few of them, and the errors
    sessions: Mapping[str, int] = field(default_factory=dict)  # of agents, by how they closed
    calls: int = 0  # of sessions, sampled
    replayed: int = 0  # requests that were answered from the log
    trainer_state: str = ""  # as its newest heartbeat says; "done" when the run has ended
    breaches: tuple[Breach, ...] = ()  # the first few of each kind
    breach_counts: Mapping[str, int] = field(default_factory=dict)
    begin: Begin | None = None  # of a branch; its samples are its own

    @property
    def ok(self) -> bool:
        """Whether the log breaks no guarantee."""
        return not self.breach_counts

    @property
    def is_proven(self) -> bool:
        """Whether every sample in flight is proven by its role's committed position."""
        return self.has_positions or not any(self.in_flight.values())

    def with_breaches(self, more: Sequence[Breach]) -> AuditReport:
        """Return the report with breaches that another source found."""
        counts = Counter(self.breach_counts)
        counts.update(breach.kind.value for breach in more)
        kept = (*self.breaches, *more[:EXAMPLES_PER_KIND])
        return replace(self, breaches=kept, breach_counts=dict(counts)) if more else self

    def to_json(self, indent: int | None = 2) -> str:
        """Return the report as one JSON object, `ok` included; in one line with `indent` None."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=indent, sort_keys=True)

    def line(self, num_killed: int | None = None) -> str:
        """The summary in one sentence.

        Args:
            num_killed: processes that the caller saw die; None leaves them out.
        """
        killed = ""
        if num_killed is not None:
            killed = f"{counted(num_killed, 'process', 'processes')} killed, "
        unread = f"unread {self.unread:,}, " if self.unread else ""
        dead = f"dead-lettered {self.dead_lettered:,}, " if self.dead_lettered else ""
        proof = "" if self.is_proven else ", without proof"
        return (
            f"{killed}{self.issued:,} samples issued: trained {self.trained:,}, "
            f"dropped {sum(self.dropped.values()):,}, {dead}evaluated {self.evaluated:,}, "
            f"{unread}in flight {sum(self.in_flight.values()):,}{proof}; "
            f"lost {self.lost:,}, trained twice {self.trained_twice:,} (read from the log)"
        )

    def text(self) -> str:
        """Many lines for a person."""
        roles = _parts(self.in_flight) if self.is_proven else "without proof"
        base = self.begin.step if self.begin else 0
        rows = [
            ("issued", self.issued, "samples"),
            ("  trained", self.trained, f"in {counted(self.steps - base, 'step')}"),
            ("  dropped", sum(self.dropped.values()), _parts(self.dropped)),
            ("  dead-lettered", self.dead_lettered, ""),
            ("  evaluated", self.evaluated, ""),
            ("  in flight", sum(self.in_flight.values()), roles),
            ("  lost", self.lost, ""),
            ("trained twice", self.trained_twice, ""),
        ]
        extras = [
            ("  unread", self.unread, "whose end may be in a step that cannot be read"),
            ("  expired", self.expired, "evaluations that retention removed"),
            ("unproven", self.unproven, "trained records that retention removed"),
            (
                "duplicates",
                self.duplicates,
                "later records of a sample or call, skipped by every reader",
            ),
            (
                "void",
                self.void,
                "events of a trainer after another one began; readers skip them",
            ),
            ("unreadable", self.unreadable, "records"),
            ("drifted", self.drifted, "redone steps with different weights"),
        ]
        extras += [
            ("sessions", sum(self.sessions.values()), _parts(self.sessions)),
            ("  calls", self.calls, f"and {self.replayed:,} answered from the log"),
        ]
        rows += [row for row in extras if row[1]]
        run = f"run {self.run}" if self.run else "a run that no trainer has claimed yet"
        lines = [f"audit of {run}, from its topics alone"]
        lines += [self.begin.text()] if self.begin else []
        lines += [f"{name:<16}{count:>12,}  {note}".rstrip() for name, count, note in rows]
        lines += [f"  {named}" for named in self.named_duplicates]
        lines += [f"  void: {named}" for named in self.named_void]
        lines += [f"  unreadable: {named}" for named in self.named_unreadable]
        redone = map(redone_text, self.redone)
        return "\n".join([*lines, self._staleness_line(), *redone, *self._verdict()])

    def _staleness_line(self) -> str:
        total = sum(self.staleness.values())
        shares = ", ".join(
            f"{distance}: {tokens / total:.1%}"
            for distance, tokens in sorted(self.staleness.items())
        )
        bound = "unknown" if self.max_staleness is None else self.max_staleness
        masked = f", {self.masked_segments:,} segments masked" if self.masked_segments else ""
        return f"staleness       {shares or 'nothing trained'}, bound {bound}{masked}"

    def _verdict(self) -> list[str]:
        if self.ok and not self.is_proven:
            num = sum(self.in_flight.values())
            return [f"ok as far as a recording tells: {num:,} in flight, without proof"]
        if self.ok:
            return ["ok: every sample accounted for"]
        lines = [f"{sum(self.breach_counts.values()):,} breaches: {_parts(self.breach_counts)}"]
        kind = max((len(b.kind.value) for b in self.breaches), default=0)
        lines += [f"  {b.kind.value:<{kind}}  {b.id:<16}  {b.detail}" for b in self.breaches]
        hidden = sum(self.breach_counts.values()) - len(self.breaches)
        return [*lines, f"  and {hidden:,} more"] if hidden else lines


def _parts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count)
