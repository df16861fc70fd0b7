"""From a run's log to the lineage of samples: reads each topic once, and only what it needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from schemas.events import Prompt
from streams.lineage import Lineage, LineageFold, SampleId
from streams.run_log import RunLog
from streams.topics import (
    DEAD_LETTERS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
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
    for topic in (STEPS, POLICY_VERSIONS, POLICY_PULLS):
        for record in log.read_topic(topic, skip_unreadable=True):
            fold.apply(record)
    if fold.dropped_groups:  # what replaced them is told by prompts of other groups
        for prompt in log.read(Prompt, skip_unreadable=True):
            is_new = prompt.event.group_id not in fold.groups
            if is_new and prompt.event.replaces in fold.dropped_groups:
                fold.apply(prompt)
    return fold.lineages()
