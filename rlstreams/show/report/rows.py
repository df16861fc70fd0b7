"""Samples of a run as rows of a table: small numbers of each, no tokens. Pure folds and queries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlstreams.schemas.events import (
    TRAIN,
    Event,
    ScoredTrajectory,
    StepCompleted,
    TensorError,
    Trajectory,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.record import Position
from rlstreams.streams.tokens import mismatch

KEPT = 300_000  # rows, the newest: about 100 MB
TRUNCATED = "length"  # a finish reason


@dataclass(slots=True, kw_only=True)
class SampleRow:
    """One sample; None: not known, or not yet."""

    name: str  # GROUP/SAMPLE
    purpose: str = TRAIN
    reward: float | None = None
    tokens: int | None = None  # sampled by the policy
    version: int | None = None  # the oldest that sampled a token
    newest: int | None = None
    staleness: int | None = None  # of its oldest trained token, versions
    mismatch: float | None = None  # largest of its tokens, nats
    step: int | None = None  # that trained it
    place: int = -1  # in the batch of that step, from 0
    advantage: float | None = None
    ended: str = ""  # finish reason of its last segment
    at_ms: int = 0  # when it was sampled
    duration: int | None = None  # of the rollout, ms


SORTED_BY = (
    "reward", "tokens", "version", "staleness", "mismatch", "duration", "step", "at_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which rows, in which order."""

    sort: str = "at_ms"
    ascending: bool = False
    purpose: str = ""
    ended: str = ""
    step: int | None = None
    version: int | None = None
    reward_max: float | None = None

    def fits(self, row: SampleRow) -> bool:
        """Whether a row is wanted."""
        return (
            (not self.purpose or row.purpose == self.purpose)
            and (not self.ended or row.ended == self.ended)
            and (self.step is None or row.step == self.step)
            and (self.version is None or row.version == self.version)
            and (
                self.reward_max is None
                or (row.reward is not None and row.reward <= self.reward_max)
            )
        )


class SampleRows:
    """Folds `steps`, `trajectories` and `scored-trajectories`, in any order between them."""

    def __init__(self) -> None:
        self._ledger = Ledger(begins_anywhere=True, on_step=self._step)
        self._rows: dict[str, SampleRow] = {}
        self.num_forgotten = 0
        self._cut: Counter[int] = Counter()  # by step: truncated samples, and all that are known
        self._known: Counter[int] = Counter()

    def apply(self, event: Event) -> None:
        """Take one event; of a sample the first record counts."""
        if isinstance(event, Trajectory):
            self._sampled(event)
        elif isinstance(event, ScoredTrajectory):
            row = self._row(f"{event.trajectory.group_id}/{event.trajectory.sample}")
            if row.mismatch is None:
                row.mismatch = _mismatch(event)
        else:
            self._ledger.apply(event)

    def _row(self, name: str) -> SampleRow:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = SampleRow(name=name)
            if len(self._rows) > KEPT:
                del self._rows[next(iter(self._rows))]
                self.num_forgotten += 1
        return row

    def _sampled(self, event: Trajectory) -> None:
        row = self._row(f"{event.group_id}/{event.sample}")
        if row.tokens is not None:
            return
        sampled = [s for s in event.segments if s.author == "policy" and len(s.token_ids)]
        row.purpose, row.reward, row.at_ms = event.purpose, event.reward, event.finished_at_ms
        row.duration = event.finished_at_ms - event.started_at_ms
        row.tokens = sum(len(segment.token_ids) for segment in sampled)
        row.version = min((s.policy_version for s in sampled), default=None)
        row.newest = max((s.policy_version for s in sampled), default=None)
        row.ended = sampled[-1].finish_reason if sampled else ""
        self._count(row)

    def _step(self, event: StepCompleted, _: Position) -> None:
        for place, ref in enumerate(event.samples):
            row = self._row(f"{ref.group_id}/{ref.sample}")
            row.step, row.place, row.advantage = event.step, place, ref.advantage
            row.staleness = event.policy_version - 1 - ref.oldest_policy_version
            if row.tokens is None:
                row.reward, row.version = ref.reward, ref.oldest_policy_version
                row.at_ms = event.started_at_ms
            self._count(row)

    def _count(self, row: SampleRow) -> None:
        if row.step is not None and row.tokens is not None:
            self._known[row.step] += 1
            self._cut[row.step] += row.ended == TRUNCATED

    def truncated(self, step: int) -> float | None:
        """Share of the step's samples that were cut at their length; None before they were read."""
        return self._cut[step] / self._known[step] if self._known[step] else None

    def of_step(self, step: int) -> list[SampleRow]:
        """The batch of a step, in its order."""
        found = [row for row in self._rows.values() if row.step == step]
        return sorted(found, key=lambda row: row.place)

    def find(self, wanted: Wanted) -> list[SampleRow]:
        """Rows that fit, sorted; those without a value come last."""
        name = wanted.sort if wanted.sort in SORTED_BY else "at_ms"
        fitting = [row for row in list(self._rows.values()) if wanted.fits(row)]
        known = [row for row in fitting if getattr(row, name) is not None]
        known.sort(key=lambda row: getattr(row, name), reverse=not wanted.ascending)
        return known + [row for row in fitting if getattr(row, name) is None]

    def row(self, name: str) -> SampleRow:
        """Of a sample that is there."""
        return self._rows[name]

    def groups(self, group_id: str) -> list[str]:
        """Names of a group's samples."""
        names = (f"{group_id}/{number}" for number in range(1024))
        return [name for name in names if name in self._rows]

    def picks(self, num: int = 2) -> list[tuple[str, SampleRow]]:
        """What a report shows: the best, the worst, the longest and the newest wrong ones.

        Trained samples where there are any, else held-out ones; each once.
        """
        rows = [row for row in self._rows.values() if row.reward is not None]
        trained = [row for row in rows if row.step is not None]
        rows = sorted(trained or rows, key=lambda row: row.at_ms, reverse=True)
        best = sorted(rows, key=lambda row: -(row.reward or 0.0))
        longest = sorted(rows, key=lambda row: -(row.tokens or 0))
        wrong = [row for row in rows if (row.reward or 0.0) < 0.5]
        shown: dict[str, tuple[str, SampleRow]] = {}
        kinds = (
            ("best", best),
            ("newest wrong", wrong),
            ("worst", best[::-1]),
            ("longest", longest),
        )
        for label, ranked in kinds:
            fresh = [row for row in ranked if row.name not in shown]
            shown |= {row.name: (label, row) for row in fresh[:num]}
        return list(shown.values())

    def newest_group(self) -> list[SampleRow]:
        """Samples of one group of the newest step: of one with unlike rewards, if there is one."""
        last = max((row.step for row in self._rows.values() if row.step is not None), default=0)
        groups: dict[str, list[SampleRow]] = {}
        for row in self.of_step(last):
            groups.setdefault(row.name.partition("/")[0], []).append(row)
        unlike = [rows for rows in groups.values() if len({row.reward for row in rows}) > 1]
        return next(iter([*unlike, *groups.values()]), [])

    def histogram(self, steps: Sequence[int]) -> list[tuple[float, int]]:
        """Rewards of the samples that these steps trained, and how many there are of each."""
        among = set(steps)
        rewards = Counter(
            round(row.reward, 3)
            for row in self._rows.values()
            if row.step in among and row.reward is not None
        )
        return sorted(rewards.items())


def _mismatch(event: ScoredTrajectory) -> float | None:
    try:
        found = mismatch(event)
    except TensorError:
        return None
    return None if math.isnan(found) else found
