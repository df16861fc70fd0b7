"""Where every sample is, from what an audit knows of it.

In flight is proven, never the remainder: the rollout group has not committed past the prompt, or
the log-prob group has not committed past the trajectory, or the scored record lies at or above the
position that the trainer recorded with its last step, in a group that is still open. A sample that
none of this and no ending explains is lost, unless its group may have ended in a record of `steps`
that cannot be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import NO_VERSION
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.audit.report import HOLD_IN_A_PART, AuditReport, BreachKind, Redone
from rlstreams.streams.audit.table import (
    DEAD,
    ISSUED,
    MEASURED,
    NOWHERE,
    ROLLED_OUT,
    SCORED_ONCE,
    TRAINED,
    group_name,
    position_at,
)
from rlstreams.streams.log.done_set import decode_done
from rlstreams.streams.log.record import Committed, Partition, Position
from rlstreams.streams.log.topics import SCORED, TRAJECTORIES

Flags = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


class Coverage:
    """What a consumer group is done with, as it had committed at one moment."""

    def __init__(self, committed: Mapping[Partition, Committed]) -> None:
        self._offsets = {p.number: at.offset for p, at in committed.items()}
        self._done = {p.number: decode_done(at.offset, at.metadata) for p, at in committed.items()}

    def covers(self, place: int) -> bool:
        """Whether it is done with the record at this place."""
        partition, offset = position_at(place)
        end = self._offsets.get(partition)
        return end is not None and (offset < end or offset in self._done[partition])


@dataclass(frozen=True, slots=True)
class Reached:
    """How far the two consumer groups are; read before any topic."""

    rollout: Coverage
    logprob: Coverage


class Classes:
    """One look at a fold: counts by class, and the breaches that only the whole shows."""

    def __init__(self, fold: AuditFold, reached: Reached) -> None:
        fold.settle()
        self._fold = fold
        self._reached = reached
        self._breaches = fold.breaches.copy()
        table = fold.table
        # Copies: a view would forbid the arrays to grow while someone holds this object.
        self._flags: Flags = np.frombuffer(bytes(table.flags), np.uint8)
        self._group: Numbers = np.array(table.group_of, np.int64)
        self._closed: Numbers = np.array(table.closed, np.int64)
        self._keys: Numbers = np.array(table.keys, np.int64)
        self._size: Numbers = np.array(table.size, np.int64)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._num_unproven = 0

    def report(self) -> AuditReport:
        """Where every sample is by now."""
        self._classify()
        self._check_groups()
        self._check_samples()
        self._check_measured()
        self._fold.ledger.check_closed_set(self._breaches)
        self._fold.versions.check(self._breaches)
        if self._fold.replay.is_part:
            self._breaches.keep_only(HOLD_IN_A_PART)
        return self._report()

    def _has(self, flag: int) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (self._flags & np.uint8(flag)) != 0
        return found

    def _classify(self) -> None:
        issued, trained, dead = self._has(ISSUED), self._has(TRAINED), self._has(DEAD)
        closed = self._closed[self._group]
        is_evaluation = self._keys[self._group] < 0
        self._count("trained", "", issued & trained)
        for slot in np.flatnonzero(issued & trained & dead):
            if self._fold.is_end_of_trained(int(slot)):
                name = self._fold.table.name(int(slot))
                self._breaches.add(BreachKind.TRAINED_AND_DEAD, name, "a sample ends once")
        self._count("dead", "", issued & ~trained & dead)
        left = issued & ~trained & ~dead
        for slot in np.flatnonzero(left & (closed > 0)):
            self._left_out(int(slot))
        for number, reason in enumerate(self._fold.ledger.reasons):
            self._count("dropped", reason, left & (closed == -1 - number))
        left &= closed == 0
        evaluated = left & is_evaluation & self._has(ROLLED_OUT)
        self._count("evaluated", "", evaluated)
        for slot in np.flatnonzero(left & ~evaluated):
            self._open(int(slot))

    def _count(self, kind: str, which: str, slots: npt.NDArray[np.bool_]) -> None:
        self._counts[kind, which] += int(np.count_nonzero(slots))

    def _left_out(self, slot: int) -> None:
        """A sample of a trained group that no batch holds."""
        table = self._fold.table
        number = table.group_of[slot]
        reason = self._fold.ledger.absent.get((number, slot - table.first[number]))
        if reason:
            self._counts["dropped", reason] += 1
        else:
            step = table.closed[number]
            self._lost(slot, f"its group was trained in step {step} without it, no reason given")

    def _open(self, slot: int) -> None:
        """A sample that has not ended: who has it next?"""
        table = self._fold.table
        flags = table.flags[slot]
        is_training = table.keys[table.group_of[slot]] >= 0
        if not self._reached.rollout.covers(table.prompt_at[slot]):
            self._counts["in flight", "rollout"] += 1
        elif flags & ROLLED_OUT and not self._reached.logprob.covers(table.trajectory_at[slot]):
            self._counts["in flight", "logprob"] += 1
        elif flags & SCORED_ONCE and is_training and self._waits(table.scored_at[slot]):
            self._counts["in flight", "trainer"] += 1
        elif is_training and self._fold.ledger.may_be_closed(table.keys[table.group_of[slot]]):
            self._counts["unread", ""] += 1
        elif flags & SCORED_ONCE:
            self._lost(slot, "scored, below the trainer's positions, its group open")
        elif flags & ROLLED_OUT:
            self._lost(slot, "rolled out, log-prob worker is past it, no score")
        elif not is_training and any(p.topic == TRAJECTORIES.name for p in self._fold.expired):
            self._counts["expired", ""] += 1
        else:
            self._lost(slot, "issued, rollout worker is past it, no trajectory")

    def _waits(self, place: int) -> bool:
        partition, offset = position_at(place)
        return offset >= self._fold.ledger.positions.get(partition, 0)

    def _lost(self, slot: int, where: str) -> None:
        self._counts["lost", ""] += 1
        self._breaches.add(BreachKind.LOST, self._fold.table.name(slot), where)

    def _check_groups(self) -> None:
        """Training groups are numbered without gaps."""
        fold, kind = self._fold, BreachKind.MISSING_GROUP
        up_to = fold.newest_group if fold.dense_up_to is None else fold.dense_up_to
        numbers = np.sort(self._keys[(self._size > 0) & (self._keys >= 0) & (self._keys <= up_to)])
        num_missing = up_to + 1 - len(numbers)
        edges = np.concatenate(([-1], numbers, [up_to + 1]))
        for at in np.flatnonzero(np.diff(edges) > 1):
            for number in range(int(edges[at]) + 1, int(edges[at + 1])):
                if not self._breaches.has_room(kind):
                    self._breaches.add_unseen(kind, num_missing)
                    return
                self._breaches.add(kind, str(number), f"groups reach {up_to}")
                num_missing -= 1

    def _check_samples(self) -> None:
        """A group is issued whole, and nothing is there that was not issued."""
        table = self._fold.table
        issued = self._has(ISSUED)
        num_issued = np.bincount(self._group[issued], minlength=len(self._keys))
        for number in np.flatnonzero(num_issued < self._size):
            self._missing(int(number))
        recorded = self._has(ROLLED_OUT | SCORED_ONCE | DEAD)
        inside = self._inside()
        for slot in np.flatnonzero(recorded & ~issued & ~inside):
            name = table.name(int(slot))
            self._breaches.add(BreachKind.NEVER_ISSUED, name, "records, but no prompt")
        num_recorded = np.bincount(self._group[recorded], minlength=len(self._keys))
        for number in np.flatnonzero((self._closed != 0) & (self._size == 0) & (num_recorded == 0)):
            name = group_name(int(self._keys[number]))
            self._breaches.add(BreachKind.NEVER_ISSUED, name, "closed, but no prompt")

    def _inside(self) -> npt.NDArray[np.bool_]:
        """Slots below the size that their group was issued with."""
        first = np.array(self._fold.table.first, np.int64)
        sample = np.arange(len(self._group)) - first[self._group]
        return (sample >= 0) & (sample < self._size[self._group])

    def _missing(self, number: int) -> None:
        table = self._fold.table
        size, first = table.size[number], table.first[number]
        for sample in range(size):
            if sample >= table.room[number] or not table.flags[first + sample] & ISSUED:
                name = f"{group_name(table.keys[number])}/{sample}"
                detail = f"group of {size}, this one was never issued"
                self._breaches.add(BreachKind.MISSING_SAMPLE, name, detail)

    def _check_measured(self) -> None:
        """Trained samples whose bytes were not where their step says."""
        table = self._fold.table
        for at in np.flatnonzero(self._has(TRAINED) & ~self._has(MEASURED)):
            slot = int(at)
            where = Position(SCORED.name, *position_at(table.used_at[slot]))
            step = table.closed[table.group_of[slot]]
            if where.offset < self._fold.begins(Partition(where.topic, where.partition)):
                self._num_unproven += 1
                self._check_unproven(slot, step)
                continue
            detail = f"step {step}: {self._holder(table.used_at[slot], where)}"
            self._breaches.add(BreachKind.UNKNOWN_POSITION, table.name(slot), detail)

    def _check_unproven(self, slot: int, step: int) -> None:
        """Retention took the bytes: the ledger's own word is still held against the bound."""
        table, trained = self._fold.table, self._fold.ledger.steps.get(step)
        if trained is None or trained.bound is None or table.oldest[slot] == NO_VERSION:
            return  # without a version all of it was masked
        if not 0 <= trained.base_version - table.oldest[slot] <= trained.bound:
            detail = f"step {step}: version {table.oldest[slot]}, bound {trained.bound}"
            self._breaches.add(BreachKind.TOO_STALE, table.name(slot), detail)

    def _holder(self, place: int, where: Position) -> str:
        """What lies where a trained sample should; asked for the few that are shown."""
        table = self._fold.table
        has_room = self._breaches.has_room(BreachKind.UNKNOWN_POSITION)
        if has_room and place != NOWHERE and place in table.scored_at:
            return f"{where} holds {table.name(table.scored_at.index(place))}"
        return f"nothing at {where}"

    def _report(self) -> AuditReport:
        fold, ledger = self._fold, self._fold.ledger
        return AuditReport(
            run=ledger.run or fold.replay.run,
            replay_of=fold.replay.run,
            is_part=fold.replay.is_part,
            steps=ledger.last_step,
            policy_version=ledger.policy_version,
            issued=sum(self._counts.values()),
            trained=self._sum("trained"),
            evaluated=self._sum("evaluated"),
            dead_lettered=self._sum("dead"),
            lost=self._sum("lost"),
            unread=self._sum("unread"),
            dropped=self._by("dropped"),
            in_flight=self._by("in flight"),
            expired=self._sum("expired"),
            trained_twice=ledger.num_trained_twice,
            staleness=dict(fold.measure.staleness),
            max_staleness=ledger.bound,
            masked_segments=ledger.num_masked,
            redone=tuple(
                Redone(
                    e.first_step,
                    e.last_step,
                    e.num_equal,
                    e.epoch,
                    tuple(f"{one.checkpoint}: {one.reason}" for one in e.passed_over),
                )
                for e in ledger.redone
            ),
            drifted=ledger.num_drifted,
            unproven=self._num_unproven,
            duplicates=fold.num_duplicates,
            named_duplicates=tuple(fold.duplicates),
            void=ledger.num_void + fold.versions.num_void,
            unreadable=fold.num_unreadable,
            trainer_state=ledger.trainer_state,
            breaches=tuple(self._breaches.kept),
            breach_counts=dict(self._breaches.counts),
        )

    def _sum(self, kind: str) -> int:
        return sum(count for (name, _), count in self._counts.items() if name == kind)

    def _by(self, kind: str) -> dict[str, int]:
        found = sorted(self._counts.items())
        return {which: count for (name, which), count in found if name == kind and count}
