"""Memory of the audit: a few numbers for each group and sample, whatever the payload's size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rlstreams.streams.log.group_ids import evaluation_id, issue_number
from rlstreams.streams.log.record import NO_PLACE

MAX_SAMPLES = 1 << 16  # of one group; a larger number is a foreign record
Origin = tuple[str, int]  # topic and place of a record
NOWHERE = NO_PLACE


@dataclass(slots=True, eq=False)
class AuditSample:
    """One sample: the places of its first records, and the ledger's facts of it."""

    group: AuditGroup
    number: int
    prompt: int = NOWHERE  # place in its topic, as the next two
    trajectory: int = NOWHERE
    scored: int = NOWHERE
    letters: tuple[Origin, ...] = ()  # its records that dead letters are about
    used: int | None = None  # place of the bytes that a step trained; None: not trained
    oldest: int = 0  # policy version of its oldest tokens, as that step says
    is_measured: bool = False  # the record at that place was seen
    judged_by: str = ""  # as its first scored record says
    facts: int | None = None  # hash of the trajectory's facts that a score may not change

    @property
    def name(self) -> str:
        """`group/sample`."""
        return f"{self.group.id}/{self.number}"


@dataclass(slots=True, eq=False)
class AuditGroup:
    """The samples of one group id."""

    id: str
    number: int | None  # of a training group; None for an evaluation
    size: int = 0  # samples that its first prompt promises; 0: no prompt was seen
    step: int = 0  # number of the step that trained it; 0: none
    dropped: str | None = None  # the reason, if it closed without a step
    samples: dict[int, AuditSample] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Neither trained nor dropped."""
        return not self.step and self.dropped is None

    def sample(self, number: int) -> AuditSample | None:
        """Return the sample of this number; None if no group has so many."""
        sample = self.samples.get(number)
        if sample is None and 0 <= number < MAX_SAMPLES:
            sample = self.samples[number] = AuditSample(self, number)
        return sample


class AuditSamples:
    """All groups by id, in the order in which they were met."""

    def __init__(self) -> None:
        self.groups: dict[str, AuditGroup] = {}

    def __iter__(self) -> Iterator[AuditSample]:
        """All samples, group by group."""
        for group in self.groups.values():
            yield from group.samples.values()

    def group(self, group_id: str) -> AuditGroup | None:
        """Return the group of this id; None: neither a training group's id nor an evaluation's."""
        group = self.groups.get(group_id)
        if group is None:
            number = issue_number(group_id)
            if number is not None or evaluation_id(group_id) is not None:
                group = self.groups[group_id] = AuditGroup(group_id, number)
        return group

    def sample(self, group_id: str, number: int) -> AuditSample | None:
        """Return the sample; None if there cannot be such a one."""
        group = self.group(group_id)
        return None if group is None else group.sample(number)
