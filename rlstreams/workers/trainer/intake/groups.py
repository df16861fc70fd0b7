"""State of one open group in the planner: its live and dead samples, without payloads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlstreams.schemas.events import AbsentSample, DeadLetter, ScoredTrajectory, Trajectory
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import SCORED
from rlstreams.streams.rows import main_row
from rlstreams.streams.segments import is_sampled, num_tokens
from rlstreams.workers.engines.base import FinishReason


@dataclass(frozen=True, slots=True)
class PolicySegment:
    """One policy segment that has tokens."""

    segment: int  # index into Trajectory.segments
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSample:
    """Facts of a scored sample that planning needs."""

    group_id: str
    sample: int
    group_size: int
    purpose: str
    row: int
    dataset_epoch: int
    replacement: int
    position: Position
    num_tokens: int  # prompt included
    segments: tuple[PolicySegment, ...]
    reward: float = 0.0
    is_truncated: bool = False  # cut at its length, not ended by the policy
    judged_by: str = ""  # "": not recorded

    @classmethod
    def of(cls, scored: ScoredTrajectory, position: Position) -> SeenSample:
        """The facts of a record."""
        trajectory = scored.trajectory
        return cls(
            group_id=trajectory.group_id,
            sample=trajectory.sample,
            group_size=trajectory.group_size,
            purpose=trajectory.purpose,
            row=trajectory.row,
            dataset_epoch=trajectory.dataset_epoch,
            replacement=trajectory.replacement,
            position=position,
            num_tokens=num_tokens(trajectory),
            segments=tuple(
                PolicySegment(index, segment.policy_version)
                for index, segment in enumerate(trajectory.segments)
                if is_sampled(segment)
            ),
            reward=trajectory.reward,
            is_truncated=is_truncated(trajectory),
            judged_by=trajectory.judged_by,
        )


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether the policy's last segment in the main row was cut at its length."""
    reasons = [s.finish_reason for s in main_row(trajectory) if s.author == "policy"]
    return bool(reasons) and reasons[-1] == FinishReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadSample:
    """Facts of a dead letter that planning needs."""

    group_id: str
    sample: int  # -1: unknown
    purpose: str
    row: int
    dataset_epoch: int
    replacement: int
    reason: str
    permanent: bool
    position: Position
    origin: Position  # of the record that the dead letter is about

    @classmethod
    def of(cls, letter: DeadLetter, position: Position) -> DeadSample:
        """The facts of a record."""
        return cls(
            group_id=letter.group_id,
            sample=letter.sample,
            purpose=letter.purpose,
            row=letter.row,
            dataset_epoch=letter.dataset_epoch,
            replacement=letter.replacement,
            reason=letter.reason,
            permanent=letter.permanent,
            position=position,
            origin=origin_of(letter),
        )


def origin_of(letter: DeadLetter) -> Position:
    """Position of the record that the dead letter is about."""
    return Position(letter.origin_topic, letter.origin_partition, letter.origin_offset)


@dataclass(slots=True, kw_only=True)
class IntakeGroup:
    """An open group. Its clock starts with its first record, dead letters included."""

    number: int
    first_seen_s: float
    origin: SeenSample | DeadSample  # the first record that names the row, else the first of all
    group_size: int | None = None  # dead letters lack it: the run's, or a sample's
    living: dict[int, SeenSample] = field(default_factory=dict)
    dead: dict[int, DeadSample] = field(default_factory=dict)
    policy_versions: set[int] = field(default_factory=set)
    is_planned: bool = False
    refusal: tuple[str, str] | None = None  # reason and detail, if no step can take it

    @property
    def group_id(self) -> str:
        """The number in the form of events."""
        return str(self.number)

    def take(self, seen: SeenSample) -> None:
        """Add a sample that is not here yet.

        Raises:
            ValueError: a sample number outside of the group, a size that differs from siblings'.
        """
        name = f"sample {sample_name(seen)} at {seen.position}"
        if not 0 <= seen.sample < seen.group_size:
            raise ValueError(f"{name}: sample must be below group_size {seen.group_size}")
        if self.group_size not in (None, seen.group_size):
            raise ValueError(
                f"{name}: group_size {seen.group_size} differs from its group's {self.group_size}"
            )
        self.group_size = seen.group_size
        self._meet(seen)
        self.living[seen.sample] = seen
        self.policy_versions.update(segment.policy_version for segment in seen.segments)

    def bury(self, dead: DeadSample) -> None:
        """Note a dead letter; of several for one sample the first counts.

        The first one about a scored record goes before all others: `is_copy` needs its position.
        """
        self._meet(dead)
        known = self.dead.get(dead.sample)
        if known is None or dead.origin.topic == SCORED.name != known.origin.topic:
            self.dead[dead.sample] = dead

    def is_copy(self, sample: int, position: Position) -> bool:
        """Whether an earlier scored record of the sample was taken or refused."""
        if sample in self.living:
            return True
        dead = self.dead.get(sample)
        return dead is not None and (
            dead.origin[:2] == position[:2] and dead.origin.offset <= position.offset
        )

    def _meet(self, seen: SeenSample | DeadSample) -> None:
        """Take the row of a record; only a dead letter of an unreadable record has none."""
        if self.origin.row < 0:
            self.origin = seen

    def in_order(self) -> list[SeenSample]:
        """Living samples by sample number."""
        return [seen for _, seen in sorted(self.living.items())]

    @property
    def lost(self) -> set[int]:
        """Numbers of samples with a dead letter alone; -1: one that could not name its sample."""
        return self.dead.keys() - self.living.keys()

    @property
    def is_complete(self) -> bool:
        """Whether each sample is alive or dead."""
        if self.group_size is None:
            return False
        return len(self.living) + sum(0 <= s < self.group_size for s in self.lost) == (
            self.group_size
        )

    def is_doomed(self, min_samples: int) -> bool:
        """Whether dead letters leave fewer samples that can live than `min_samples` (0: all)."""
        lost = self.lost
        if -1 in lost or (lost and min_samples == 0):
            return True
        if self.group_size is None:
            return False
        can_live = self.group_size - sum(0 <= s < self.group_size for s in lost)
        return can_live < min(min_samples or self.group_size, self.group_size)

    @property
    def judges(self) -> list[str]:
        """Recorded judges of its samples: rewards compare if there is at most one."""
        return sorted({seen.judged_by for seen in self.living.values() if seen.judged_by})

    def absent(self) -> Iterable[AbsentSample]:
        """Samples that a batch with this group lacks, by sample number."""
        for sample in sorted(self.lost):
            yield AbsentSample(
                group_id=self.group_id, sample=sample, reason=self.dead[sample].reason
            )

    def positions(self) -> Iterable[Position]:
        """Positions of all its records."""
        yield from (seen.position for seen in self.living.values())
        yield from (dead.position for dead in self.dead.values())

    def describe(self, now_s: float) -> str:
        """One line for the reason of a drop."""
        size = "?" if self.group_size is None else str(self.group_size)
        dead = ", ".join(f"{s} {self.dead[s].reason}" for s in sorted(self.lost))
        line = f"{len(self.living)} of {size} samples after {now_s - self.first_seen_s:.1f} s"
        line = f"{line}; dead: {dead}" if dead else line
        judges = self.judges
        line = f"{line}; judged by {' and '.join(judges)}" if len(judges) > 1 else line
        return f"{line}; {self.refusal[1]}" if self.refusal else line
