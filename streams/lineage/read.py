"""From a run's log to the lineage of samples: reads each topic once, and only what it needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlstreams.schemas.avro import fingerprint, schema_text
from rlstreams.schemas.binary import HEADER_BYTES, MARKER
from rlstreams.schemas.events import GroupsDropped, Prompt, StepCompleted, TrainerHeartbeat
from rlstreams.schemas.varint import long_bytes
from rlstreams.streams.lineage.fold import Lineage, LineageFold, SampleId
from rlstreams.streams.log.record import RawRecord
from rlstreams.streams.log.topics import (
    DEAD_LETTERS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
)
from rlstreams.streams.run.run_log import RunLog

# Events that matter to a group only if they name it, by their first bytes.
_ABOUT_GROUPS = frozenset(
    MARKER + fingerprint(schema_text(kind.__name__))
    for kind in (StepCompleted, GroupsDropped, TrainerHeartbeat)
)


def read_lineages(
    log: RunLog, samples: Sequence[SampleId], groups: Collection[str] = ()
) -> list[Lineage]:
    """What the log says of these samples, in their order, and of every sample of `groups`.

    Raises:
        DeadlineError: a partition did not deliver up to its end.
    """
    fold = LineageFold(samples, groups)
    for topic in (PROMPTS, TRAJECTORIES, SCORED, DEAD_LETTERS):
        for record in log.read_topic(topic, fold.groups, skip_unreadable=True):
            fold.apply(record)
    may_matter = _Sieve(fold.groups)
    for topic in (STEPS, POLICY_VERSIONS, POLICY_PULLS):
        for record in log.read_topic(topic, skip_unreadable=True, only=may_matter):
            fold.apply(record)
    if fold.dropped_groups:  # what replaced them is told by prompts of other groups
        for prompt in log.read(Prompt, skip_unreadable=True):
            is_new = prompt.event.group_id not in fold.groups
            if is_new and prompt.event.replaces in fold.dropped_groups:
                fold.apply(prompt)
    return fold.lineages()


class _Sieve:
    """Tells, without decoding, which records of `steps` may speak of a group.

    A step names its samples one by one, so it is much the largest record of its topic, and of all
    steps at most one matters to a sample. In Avro a group's id stands as it is, behind its length.
    """

    def __init__(self, groups: Collection[str]) -> None:
        names = [group.encode() for group in groups]
        self._needles = [long_bytes(len(name)) + name for name in names]

    def __call__(self, raw: RawRecord) -> bool:
        value = bytes(raw.value)
        if value[:HEADER_BYTES] not in _ABOUT_GROUPS:  # a claim, weights, or another release's
            return True
        return any(needle in value for needle in self._needles)
