"""Classes of the audit: the fold's facts of a sample put it in exactly one.

In flight is proven, never the remainder: the rollout group has not committed past the prompt, or
the log-prob group has not committed past the trajectory, or the scored record lies at or above the
position that the trainer recorded with its last step, in a group that is still open. A sample that
none of this and no ending explains is lost, unless its group may have ended in a record of `steps`
that cannot be read (decision 0009).

A recording holds no committed positions: there a sample of an open group that did not reach the
trainer counts as in flight, and the report says that this is not proven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rlstreams.schemas.events import NO_VERSION, RunBranched
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.audit.report import (
    EXAMPLES_PER_KIND,
    AuditReport,
    Begin,
    BreachKind,
)
from rlstreams.streams.audit.samples import NOWHERE, AuditGroup, AuditSample
from rlstreams.streams.log.done_set import covered
from rlstreams.streams.log.record import Committed, Partition, position_at
from rlstreams.streams.log.text import by_number
from rlstreams.streams.log.topics import PROMPTS, SCORED, STEPS, TRAJECTORIES

UNKNOWN = "unknown"  # in place of the role that has a sample next


@dataclass(frozen=True, slots=True)
class Reached:
    """Committed positions of the two consumer groups, read before any topic."""

    rollout: Mapping[Partition, Committed]
    logprob: Mapping[Partition, Committed]


class Classes:
    """Counts of a fold's samples by class, and the breaches that only the whole log shows.

    Args:
        fold: of a run's records.
        reached: positions of the groups; None: not known, as of a recording.
    """

    def __init__(self, fold: AuditFold, reached: Reached | None) -> None:
        fold.settle()
        self._fold = fold
        self._ledger = fold.ledger
        self._reached = reached
        self._breaches = fold.breaches.copy()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._num_unproven = 0
        self._undelivered: list[str] = []

    def report(self) -> AuditReport:
        """Return the report on every sample by now."""
        groups = self._fold.samples.groups.values()
        for group in sorted(groups, key=lambda one: by_number(one.id)):
            for _, sample in sorted(group.samples.items()):
                if sample.prompt != NOWHERE:
                    self._counts[self._class_of(sample)] += 1
                if sample.used is not None and not sample.is_measured:
                    self._check_place(sample, sample.used)
            self._check_group(group)
        self._check_numbers()
        self._ledger.check_closed_set(self._breaches)
        self._fold.check_scores(self._breaches)
        self._fold.sessions.check(self._breaches, self._undelivered)
        void = self._ledger.void + self._fold.versions.check(self._breaches)
        return self._report([str(position) for position in void])

    def _class_of(self, sample: AuditSample) -> tuple[str, str]:
        """Return the class of an issued sample, and the reason or role that goes with it."""
        group = sample.group
        if sample.used is not None:
            if sample.letters and _ends_trained(sample):
                detail = "a sample ends once"
                self._breaches.add(BreachKind.TRAINED_AND_DEAD, sample.name, detail)
            return "trained", ""
        if sample.letters:
            return "dead", ""
        if not group.is_open:
            return self._left_out(sample)
        if group.number is None and sample.trajectory != NOWHERE:
            return "evaluated", ""
        if role := self._next_role(sample):
            return "in flight", role
        return self._unexplained(sample)

    def _left_out(self, sample: AuditSample) -> tuple[str, str]:
        """Return the class of a sample of a closed group that no batch holds."""
        group = sample.group
        if group.dropped is not None and not group.step:
            return "dropped", group.dropped
        if reason := self._ledger.absent.get((group.id, sample.number)):
            return "dropped", reason
        detail = f"its group was trained in step {group.step} without it, no reason given"
        return self._lost(sample, detail)

    def _next_role(self, sample: AuditSample) -> str:
        """Return the role that provably has yet to work on a sample of an open group; "": none."""
        if self._reached is None:
            is_past = sample.scored != NOWHERE and not self._waits(sample.scored)
            return "" if is_past else UNKNOWN
        if not _covers(self._reached.rollout, PROMPTS.name, sample.prompt):
            return "rollout"
        if sample.trajectory != NOWHERE and not _covers(
            self._reached.logprob, TRAJECTORIES.name, sample.trajectory
        ):
            return "logprob"
        is_training = sample.group.number is not None
        return "trainer" if is_training and self._waits(sample.scored) else ""

    def _unexplained(self, sample: AuditSample) -> tuple[str, str]:
        number = sample.group.number
        if number is not None and self._ledger.may_be_closed(number):
            return "unread", ""
        if sample.scored != NOWHERE:
            return self._lost(sample, "scored, below the trainer's positions, its group open")
        if sample.trajectory != NOWHERE:
            return self._lost(sample, "rolled out, log-prob worker is past it, no score")
        if number is None and any(p.topic == TRAJECTORIES.name for p in self._fold.expired):
            return "expired", ""
        self._undelivered.append(sample.name)
        return self._lost(sample, "issued, rollout worker is past it, no trajectory")

    def _waits(self, place: int) -> bool:
        """Whether a restarted trainer reads the scored record at this place."""
        if place == NOWHERE:
            return False
        at = position_at(SCORED.name, place)
        return at.offset >= self._ledger.positions.get(at.partition, 0)

    def _lost(self, sample: AuditSample, where: str) -> tuple[str, str]:
        self._breaches.add(BreachKind.LOST, sample.name, where)
        return "lost", ""

    def _check_group(self, group: AuditGroup) -> None:
        """Check that a group was issued whole, and that it has no record of a sample not issued."""
        add, samples = self._breaches.add, group.samples
        issued = {number for number, sample in samples.items() if sample.prompt != NOWHERE}
        if len(issued) < group.size:
            detail = f"group of {group.size}, this one was never issued"
            for number in range(group.size):
                if number not in issued:
                    add(BreachKind.MISSING_SAMPLE, f"{group.id}/{number}", detail)
        recorded = [sample for sample in samples.values() if self._is_recorded(sample)]
        for sample in recorded:
            if sample.number not in issued and sample.number >= group.size:
                add(BreachKind.NEVER_ISSUED, sample.name, "records, but no prompt")
        trained = [sample for sample in samples.values() if sample.used is not None]
        judges = sorted({sample.judged_by for sample in trained if sample.judged_by})
        if len(judges) > 1:
            detail = f"trained in step {group.step}, judged by {' and '.join(judges)}"
            add(BreachKind.MIXED_CODE, group.id, detail)
        if not (group.is_open or group.size or recorded):
            add(BreachKind.NEVER_ISSUED, group.id, "closed, but no prompt")

    def _is_recorded(self, sample: AuditSample) -> bool:
        """Whether a dead letter or a readable record names the sample."""
        found = {field for field in ("trajectory", "scored") if getattr(sample, field) != NOWHERE}
        named = {field for field in found if (field, sample) in self._fold.by_headers}
        return bool(sample.letters or found - named)

    def _check_numbers(self) -> None:
        """Check that training groups are numbered without gaps."""
        fold = self._fold
        up_to = fold.newest_group if fold.dense_up_to is None else fold.dense_up_to
        groups = fold.samples.groups.values()
        issued = {group.number for group in groups if group.size and group.number is not None}
        kind, detail = BreachKind.MISSING_GROUP, f"groups reach {up_to}"
        self._ledger.add_gaps(self._breaches, kind, issued, up_to + 1, detail)

    def _check_place(self, sample: AuditSample, place: int) -> None:
        """Add the breach of a trained sample whose bytes were not seen at its step's position."""
        where, step = position_at(SCORED.name, place), sample.group.step
        if where.offset < self._fold.begins(SCORED.name, where.partition):
            self._num_unproven += 1
            self._check_unproven(sample, step)
            return
        detail = f"nothing at {where}"
        if self._breaches.has_room(BreachKind.UNKNOWN_POSITION) and place != NOWHERE:
            holders = (other.name for other in self._fold.samples if other.scored == place)
            if (holder := next(holders, None)) is not None:
                detail = f"{where} holds {holder}"
        self._breaches.add(BreachKind.UNKNOWN_POSITION, sample.name, f"step {step}: {detail}")

    def _check_unproven(self, sample: AuditSample, step: int) -> None:
        """Check the ledger's own staleness against the bound, where retention removed the bytes."""
        base, bound = self._ledger.steps[step]
        if bound is None or sample.oldest == NO_VERSION:
            return  # without a version, every segment was masked
        if not 0 <= base - sample.oldest <= bound:
            detail = f"step {step}: version {sample.oldest}, bound {bound}"
            self._breaches.add(BreachKind.TOO_STALE, sample.name, detail)

    def _report(self, void: list[str]) -> AuditReport:
        fold, ledger = self._fold, self._ledger
        return AuditReport(
            run=ledger.run,
            steps=ledger.last_step,
            policy_version=ledger.policy_version,
            issued=self._counts.total(),
            trained=self._counts["trained", ""],
            evaluated=self._counts["evaluated", ""],
            dead_lettered=self._counts["dead", ""],
            lost=self._counts["lost", ""],
            unread=self._counts["unread", ""],
            dropped=self._by("dropped"),
            in_flight=self._by("in flight"),
            has_positions=self._reached is not None,
            expired=self._counts["expired", ""],
            trained_twice=ledger.num_trained_twice,
            staleness=dict(fold.staleness.tokens),
            max_staleness=ledger.bound,
            masked_segments=ledger.num_masked,
            redone=tuple(ledger.redone),
            drifted=ledger.num_drifted,
            unproven=self._num_unproven,
            duplicates=fold.duplicates.count,
            named_duplicates=fold.duplicates.in_order(),
            void=len(void),
            named_void=tuple(void[:EXAMPLES_PER_KIND]),
            unreadable=fold.unreadable.count,
            named_unreadable=fold.unreadable.in_order(),
            sessions=fold.sessions.by_kind,
            calls=fold.sessions.num_calls,
            replayed=fold.sessions.num_replays,
            trainer_state=ledger.trainer_state,
            breaches=self._breaches.in_order(),
            breach_counts=dict(self._breaches.counts),
            begin=_begin_of(ledger.branch),
        )

    def _by(self, kind: str) -> dict[str, int]:
        found = sorted(self._counts.items())
        return {which: count for (name, which), count in found if name == kind}


def _begin_of(branch: RunBranched | None) -> Begin | None:
    if branch is None:
        return None
    return Begin(
        parent=branch.parent,
        parent_place=branch.parent_place,
        step=branch.step,
        weight_hash=branch.weight_hash,
        steps_id=branch.topic_ids.get(STEPS.name, ""),
    )


def _covers(committed: Mapping[Partition, Committed], topic: str, place: int) -> bool:
    """Whether a group with these committed positions is done with the record at a place."""
    at = position_at(topic, place)
    return covered(committed.get(Partition(topic, at.partition)), at.offset)


def _ends_trained(sample: AuditSample) -> bool:
    """Whether a dead letter for a trained sample is about the record that was trained.

    The trainer trains a sample that has one sound record, and sets aside a copy that is not sound;
    the copy is a duplicate. So a dead letter contradicts the ledger if it is about the record that
    the step took, or about the sample's first record in another topic, from which that was made;
    also where retention hides the latter.
    """
    made_of = {
        SCORED.name: sample.used,
        TRAJECTORIES.name: sample.trajectory,
        PROMPTS.name: sample.prompt,
    }
    return any(made_of.get(topic, NOWHERE) in (place, NOWHERE) for topic, place in sample.letters)
