"""Choice of the groups to train next, and to drop. Pure: takes ids, versions and times.

The planner keeps no payloads. The trainer adds samples and dead letters as they are read, asks for
drops and for a plan, and reports which groups are closed once `steps` records it.

Invariants, for any order of calls:

1. *A sample is planned at most once.* `plan` hands its groups over (they are neither planned nor
   dropped again) and `close` removes them for good: a group number in the closed set never
   enters again, and a second record of a (group, sample) is ignored, so the first one wins. It
   wins also if it was refused: its dead letter has its position, for successors as well.
2. *No trained token is staler than `max_staleness`.* `plan(version)` compares every policy segment
   with the version that the step starts from, the number that the audit checks the ledger with too.
   A segment stays in the loss only if 0 <= version - segment's version <= max_staleness; otherwise
   it is listed in `masked` ("mask"), or its group is not planned at all ("drop"); with
   `loss.mask_truncated`, the segments of a truncated sample are listed there too, whatever their
   age. A segment cannot become staler between plan and step: the plan names its version, and only
   steps make versions. A version from the future is invalid in the ledger too and is treated the
   same way.
3. *Drops never wait for a step.* `drops` looks at no other group and needs no full batch. So each
   open group is complete and trainable, or gets a drop reason by its own deadline.
4. *Rewards of a group compare.* Samples that were judged by different code or settings
   (`Trajectory.judged_by`) are not trained together: their group is dropped as `mixed_code`.
5. *Arrival order does not matter.* Among complete groups, the lowest numbers are planned first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlstreams.schemas.events import (
    EVALUATE,
    NO_VERSION,
    AbsentSample,
    ClosedGroups,
    DroppedGroup,
    MaskedSegment,
)
from rlstreams.streams.log.group_ids import issue_number
from rlstreams.streams.log.record import Partition, Position
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.trainer.intake.closed import ClosedSet
from rlstreams.workers.trainer.intake.groups import DeadSample, IntakeGroup, SeenSample

MIXED_CODE = "mixed_code"
NOT_AGAIN = ("no_signal", "truncated")  # another row takes the place in the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSample:
    """A sample of a plan. `oldest_policy_version` is of its unmasked segments, or NO_VERSION."""

    seen: SeenSample
    oldest_policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The batch of one step that starts from `policy_version`."""

    policy_version: int
    group_ids: tuple[str, ...]  # in issue order
    samples: tuple[PlannedSample, ...]  # batch order: by group, then by sample number
    masked: tuple[MaskedSegment, ...]
    absent: tuple[AbsentSample, ...]


class Admission:
    """The planner. Times are seconds of any one monotonic clock.

    Args:
        group_size: of every group of the run, so that a group of dead letters alone can end as soon
            as too few samples are left; None: known from a group's first sample.
    """

    def __init__(
        self,
        section: TrainerSection,
        closed: ClosedGroups | None = None,
        *,
        group_size: int | None = None,
    ) -> None:
        self._section = section
        self._group_size = group_size
        self._closed = ClosedSet(closed)
        self._groups: dict[int, IntakeGroup] = {}

    @property
    def closed(self) -> ClosedGroups:
        """The closed set as it is written to `steps`."""
        return self._closed.event()

    @property
    def num_open_groups(self) -> int:
        """Groups that are not closed and have a sample or dead letter."""
        return len(self._groups)

    def is_copy(self, group_id: str, sample: int, position: Position) -> bool:
        """Whether a scored record does not count, because it is not the first of its sample."""
        number = issue_number(group_id)
        group = None if number is None else self._groups.get(number)
        return group is not None and group.is_copy(sample, position)

    def add(self, seen: SeenSample, now_s: float) -> bool:
        """Note a sample; False if that changes nothing and its payload can be released.

        Raises:
            ValueError: a group id that is no issue number, a sample number outside of its group,
                a group size that differs from its siblings'.
        """
        if seen.purpose == EVALUATE:
            return False
        number = group_number(seen.group_id)
        if number in self._closed or self.is_copy(seen.group_id, seen.sample, seen.position):
            return False
        group = self._group(number, seen, now_s)
        group.take(seen)
        self._groups[number] = group
        return True

    def dead(self, dead: DeadSample, now_s: float) -> bool:
        """Note a dead letter; False if it names no open training group.

        A sample that is also alive counts as alive, whichever was read first: then the dead letter
        is about a copy, or about an earlier stage, whose topic has no order with this one. A dead
        letter that cannot name its sample (-1) ends its group, which could never be known to be
        complete.
        """
        number = issue_number(dead.group_id)
        if dead.purpose == EVALUATE or number is None or number in self._closed:
            return False
        group = self._group(number, dead, now_s)
        group.bury(dead)
        self._groups[number] = group
        return True

    def drops(self, version: int, now_s: float) -> list[DroppedGroup]:
        """Groups to drop now, lowest number first, if `version` is the newest one held.

        Nothing changes until `close`: an aborted commit asks again and gets the same answer.
        """
        found = []
        for group in self._open_groups():
            reason = self._drop_reason(group, version, now_s)
            if reason:
                found.append(_dropped(group, reason, version, now_s))
        return found

    def plan(self, version: int) -> Plan | None:
        """The next step from `version`, or None while too few groups are complete.

        The groups are handed over: `drops` and later plans pass them by until they are closed.
        """
        ready = [g for g in self._open_groups() if self._is_ready(g, version)]
        if len(ready) < self._section.groups_per_step:
            return None
        chosen = ready[: self._section.groups_per_step]
        for group in chosen:
            group.is_planned = True
        samples = [seen for group in chosen for seen in group.in_order()]
        return Plan(
            policy_version=version,
            group_ids=tuple(group.group_id for group in chosen),
            samples=tuple(self._planned(seen, version) for seen in samples),
            masked=tuple(m for seen in samples for m in self._masked(seen, version)),
            absent=tuple(absent for group in chosen for absent in group.absent()),
        )

    def give_back(self, plan: Plan, refused: Mapping[str, tuple[str, str]]) -> None:
        """Reopen the groups of a plan that could not be trained, some of them to be dropped.

        Args:
            refused: reason and detail by group, of those that no step can take.
        """
        for group_id in plan.group_ids:
            group = self._groups[group_number(group_id)]
            group.is_planned = False
            group.refusal = refused.get(group_id)

    def close(self, group_ids: Iterable[str]) -> None:
        """Forget groups that `steps` has as trained or dropped.

        Raises:
            ValueError: a group is closed already; a group closes once.
        """
        numbers = [group_number(group_id) for group_id in group_ids]
        for number in numbers:
            if number in self._closed:
                raise ValueError(f"group {number} is closed already")
            self._closed.add(number)
            self._groups.pop(number, None)

    def closed_after(self, group_ids: Iterable[str]) -> ClosedGroups:
        """The closed set once `group_ids` are in it too, for the event that closes them."""
        return self._closed.union(group_number(group_id) for group_id in group_ids).event()

    def low_watermarks(
        self, read: Mapping[Partition, int], closing: Iterable[str] = ()
    ) -> dict[Partition, int]:
        """Per partition the lowest offset that a restart must read again.

        Args:
            read: next offset to read, by partition of scored-trajectories and dead-letters.
            closing: groups that the event which carries the answer closes.
        """
        low = dict(read)
        gone = {group_number(group_id) for group_id in closing}
        for number, group in self._groups.items():
            for position in group.positions() if number not in gone else ():
                partition = Partition(position.topic, position.partition)
                low[partition] = min(position.offset, low.get(partition, position.offset))
        return low

    def positions_of(self, group_ids: Iterable[str]) -> list[Position]:
        """Positions of the samples of these groups; none for groups that are not open."""
        groups = (self._groups.get(group_number(group_id)) for group_id in group_ids)
        return [seen.position for group in groups if group for seen in group.in_order()]

    def _group(self, number: int, seen: SeenSample | DeadSample, now_s: float) -> IntakeGroup:
        return self._groups.get(number) or IntakeGroup(
            number=number, first_seen_s=now_s, origin=seen, group_size=self._group_size
        )

    def _open_groups(self) -> list[IntakeGroup]:
        return [g for _, g in sorted(self._groups.items()) if not g.is_planned]

    def _is_fresh(self, policy_version: int, version: int) -> bool:
        return 0 <= version - policy_version <= self._section.max_staleness

    def _is_out(self, seen: SeenSample) -> bool:
        """Whether the sample is compared with its siblings and not learnt from."""
        return self._section.loss.mask_truncated and seen.is_truncated

    def _unusable(self, group: IntakeGroup) -> str:
        """Reason that a complete group would teach nothing; "": none."""
        if len(group.judges) > 1:
            return MIXED_CODE
        living = group.living.values()
        if all(self._is_out(seen) for seen in living):
            return "truncated"
        is_alone = len(living) == 1 and self._section.loss.lone == "reward"
        is_equal = len({seen.reward for seen in living}) == 1
        drops = self._section.equal_rewards == "drop"
        return "no_signal" if drops and is_equal and not is_alone else ""

    def _is_stale(self, group: IntakeGroup, version: int) -> bool:
        versions = {
            segment.policy_version
            for seen in group.living.values()
            if not self._is_out(seen)
            for segment in seen.segments
        }
        fresh = [self._is_fresh(v, version) for v in versions]
        if self._section.on_stale == "drop":
            return not all(fresh)
        # An incomplete group may still get a fresh sample; its deadline bounds the wait.
        return group.is_complete and not any(fresh)

    def _is_ready(self, group: IntakeGroup, version: int) -> bool:
        minimum = self._section.min_group_samples
        return (
            group.is_complete
            and not group.is_doomed(minimum)
            and not group.refusal
            and not self._unusable(group)
            and not self._is_stale(group, version)
        )

    def _drop_reason(self, group: IntakeGroup, version: int, now_s: float) -> str:
        if group.refusal:
            return group.refusal[0]
        if group.is_doomed(self._section.min_group_samples):
            return "dead_samples"
        if group.is_complete and (reason := self._unusable(group)):
            return reason
        if self._is_stale(group, version):
            return "stale"
        overdue = now_s - group.first_seen_s > self._section.group_deadline_s
        if overdue and not group.is_complete:
            return "incomplete" if group.living else "dead_samples"
        return ""

    def _planned(self, seen: SeenSample, version: int) -> PlannedSample:
        trained = [] if self._is_out(seen) else [s.policy_version for s in seen.segments]
        trained = [v for v in trained if self._is_fresh(v, version)]
        return PlannedSample(seen=seen, oldest_policy_version=min(trained, default=NO_VERSION))

    def _masked(self, seen: SeenSample, version: int) -> Iterable[MaskedSegment]:
        for segment in seen.segments:
            if self._is_out(seen) or not self._is_fresh(segment.policy_version, version):
                yield MaskedSegment(
                    group_id=seen.group_id,
                    sample=seen.sample,
                    segment=segment.segment,
                    staleness=version - segment.policy_version,
                )


def group_number(group_id: str) -> int:
    """The issue number in a training group's id.

    Raises:
        ValueError: any other text, `07` included: two ids must not name one number.
    """
    number = issue_number(group_id)
    if number is None:
        raise ValueError(f"group_id must be an issue number, got {group_id[:40]!r}")
    return number


def _dropped(group: IntakeGroup, reason: str, version: int, now_s: float) -> DroppedGroup:
    oldest = min(group.policy_versions, default=version)
    return DroppedGroup(
        group_id=group.group_id,
        reason=reason,
        permanent=reason in NOT_AGAIN
        or (reason == "dead_samples" and any(d.permanent for d in group.dead.values())),
        staleness=version - oldest,
        row=group.origin.row,
        dataset_epoch=group.origin.dataset_epoch,
        replacement=group.origin.replacement,
        detail=group.describe(now_s),
    )
