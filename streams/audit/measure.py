"""Holds the versions of trained tokens against the steps that trained them.

A sample is measured once, when both are known: the step that took it, and the scored record at the
very place that the step names. Records that no step has taken yet wait, a few numbers each.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.walk import Numbers
from rlstreams.streams.audit.ledger import Ledger
from rlstreams.streams.audit.report import Breaches, BreachKind
from rlstreams.streams.audit.rows import Segments
from rlstreams.streams.audit.table import MEASURED, TRAINED, Table

_UNBOUND = 1 << 62  # of staleness
# What a stranger's record or claim says is held to these, so that sums and differences are exact.
_VERSIONS, _TOKENS = 1 << 61, 1 << 40
_INDEX_BITS = 32
Chosen = npt.NDArray[np.bool_]
# (index, version, tokens) of each of the policy's segments
_Held = tuple[tuple[int, int, int], ...]


class Measure:
    """Counts trained tokens by staleness, and names what is too stale or mislabelled."""

    def __init__(self, table: Table, ledger: Ledger, breaches: Breaches) -> None:
        self.staleness: Counter[int] = Counter()  # tokens
        self._table = table
        self._ledger = ledger
        self._breaches = breaches
        # By place: scored and not trained yet; group of the table, sample, segments.
        self._waiting: dict[int, tuple[int, int, _Held]] = {}

    def scored(self, slots: Numbers, places: Numbers, segments: Segments) -> None:
        """Take scored records, each with its sample's slot and its own place."""
        table = self._table
        groups = np.frombuffer(table.group_of, np.int32)[slots]
        is_trained = np.frombuffer(table.used_at, np.int64)[slots] == places
        is_open = np.frombuffer(table.closed, np.int64)[groups] == 0
        trained = np.flatnonzero(is_trained)
        self._measure(slots[trained], segments.of(trained, len(slots)))
        waiting = np.flatnonzero(is_open & ~is_trained)
        if len(waiting):
            self._hold(slots[waiting], places[waiting], segments.of(waiting, len(slots)))

    def fresh(self) -> None:
        """Measure what was scored before this audit saw the step that trained it."""
        table, found = self._table, []
        for place in self._ledger.fresh:
            held = self._waiting.get(place)
            if held is not None:
                number, sample, of_it = held
                slot = table.first[number] + sample
                if table.used_at[slot] == place:
                    del self._waiting[place]
                    found.append((slot, of_it))
        self._ledger.fresh.clear()
        if found:
            rows = [(row, *one) for row, (_, held) in enumerate(found) for one in held]
            columns = np.array(rows, np.int64).reshape(-1, 4).T
            row, index, version, tokens = columns
            segments = Segments(row=row, index=index, version=version, tokens=tokens)
            self._measure(np.array([slot for slot, _ in found], np.int64), segments)

    def settle(self) -> None:
        """Forget what closed groups no longer need."""
        closed = self._table.closed
        self._waiting = {p: held for p, held in self._waiting.items() if not closed[held[0]]}

    def _hold(self, slots: Numbers, places: Numbers, segments: Segments) -> None:
        table = self._table
        held: list[list[tuple[int, int, int]]] = [[] for _ in slots]
        columns = (segments.index.tolist(), segments.version.tolist(), segments.tokens.tolist())
        for row, *one in zip(segments.row.tolist(), *columns, strict=True):
            held[row].append((one[0], one[1], one[2]))
        for slot, place, of_it in zip(slots.tolist(), places.tolist(), held, strict=True):
            number = table.group_of[slot]
            self._waiting[place] = (number, slot - table.first[number], tuple(of_it))

    def _measure(self, slots: Numbers, segments: Segments) -> None:
        """Samples that a step names, each where that step found it; `segments.row` counts them."""
        if not len(slots):
            return
        steps = np.frombuffer(self._table.closed, np.int64)[
            np.frombuffer(self._table.group_of, np.int32)[slots]
        ]
        base, bound, is_due = self._versions(steps)
        is_due &= self._mark(slots)
        chosen = is_due[segments.row] & (segments.tokens != 0)
        if self._ledger.masked:
            chosen &= ~self._is_masked(slots, np.flatnonzero(is_due), segments)
        row = segments.row[chosen]
        version = np.clip(segments.version[chosen], -_VERSIONS, _VERSIONS)
        staleness = base[row] - version
        values, which = np.unique(staleness, return_inverse=True)
        sums = np.zeros(len(values), np.int64)
        np.add.at(sums, which, np.clip(segments.tokens[chosen], -_TOKENS, _TOKENS))
        self.staleness.update(dict(zip(values.tolist(), sums.tolist(), strict=True)))
        for at in np.flatnonzero((staleness < 0) | (staleness > bound[row])).tolist():
            index, sample = int(segments.index[chosen][at]), int(row[at])
            detail = (
                f"step {steps[sample]}, segment {index}: version {version[at]} "
                f"trained on {base[sample]}, bound {self._ledger.steps[int(steps[sample])].bound}"
            )
            self._breaches.add(BreachKind.TOO_STALE, self._table.name(int(slots[sample])), detail)
        self._check_labels(slots, steps, row, version)

    def _check_labels(self, slots: Numbers, steps: Numbers, row: Numbers, version: Numbers) -> None:
        """The step's own word for the oldest version of each sample's tokens."""
        oldest = np.full(len(slots), _UNBOUND)
        np.minimum.at(oldest, row, version)
        said = np.frombuffer(self._table.oldest, np.int32)[slots]
        for at in np.flatnonzero((oldest != _UNBOUND) & (oldest != said)).tolist():
            detail = f"step {steps[at]} says version {said[at]}, tokens {oldest[at]}"
            self._breaches.add(BreachKind.MISLABELLED, self._table.name(int(slots[at])), detail)

    def _mark(self, slots: Numbers) -> Chosen:
        """Note that these are measured; which of them are so for the first time, and trained."""
        flags = np.frombuffer(self._table.flags, np.uint8)
        _, first = np.unique(slots, return_index=True)
        is_due = np.zeros(len(slots), np.bool_)
        is_due[first] = (flags[slots[first]] & (MEASURED | TRAINED)) == TRAINED
        flags[slots] |= np.uint8(MEASURED)
        return is_due

    def _versions(self, steps: Numbers) -> tuple[Numbers, Numbers, Chosen]:
        """What each of these steps trained on, its bound, and whether it is known."""
        distinct, which = np.unique(steps, return_inverse=True)
        known = [self._ledger.steps.get(step) for step in distinct.tolist()]
        base = [0 if step is None else _within(step.base_version, _VERSIONS) for step in known]
        bound = [
            _UNBOUND if step is None or step.bound is None else _within(step.bound, _UNBOUND)
            for step in known
        ]
        is_known = np.array([step is not None for step in known], np.bool_)
        return (
            np.array(base, np.int64)[which],
            np.array(bound, np.int64)[which],
            is_known[which],
        )

    def _is_masked(self, slots: Numbers, due: Numbers, segments: Segments) -> Chosen:
        """Which segments their step left out; asked once for each sample."""
        table, masked = self._table, []
        for row, slot in zip(due.tolist(), slots[due].tolist(), strict=True):
            number = table.group_of[slot]
            for index in self._ledger.masked.pop((number, slot - table.first[number]), ()):
                if 0 <= index < 1 << _INDEX_BITS:
                    masked.append(row << _INDEX_BITS | index)
        return np.isin(segments.row << _INDEX_BITS | segments.index, masked)


def _within(number: int, limit: int) -> int:
    return max(-limit, min(number, limit))
