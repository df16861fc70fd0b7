"""Whether the log still has, and will have, what a restarted trainer reads again. Looks only."""

from __future__ import annotations

from rlstreams.start.doctor.check import Check, fail, ok, warn
from rlstreams.streams.kafka.facts import BrokerFacts
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.redo_needs import NeedsView, Retention, retention_problems
from rlstreams.streams.log.topic import Topic
from rlstreams.streams.log.topics import STEPS
from rlstreams.streams.views.feed import Feed

READ_S = 30.0  # longest wait for the next record of `steps`


def kept_check(bus: Bus, facts: BrokerFacts, checkpoint_every: int) -> Check:
    """What redo and the samples that wait need, against retention.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
        DeadlineError: it stopped delivering.
    """
    view = NeedsView(checkpoint_every)
    read_whole(bus, view, STEPS)
    needs = view.needs
    if not needs:
        return ok("kept", "no step yet: nothing has to be kept for a redo")
    kept = {
        Partition(name, number): holds
        for name, topic in facts.topics.items()
        for number, holds in topic.kept.items()
    }
    retention = {name: Retention.of(topic.settings) for name, topic in facts.topics.items()}
    problems = list(retention_problems(needs, kept, retention, now_ms()))
    gone = [problem for problem in problems if problem.is_gone]
    if gone:
        return fail(
            "kept", "; ".join(problem.text for problem in gone),
            "this run cannot be redone from its log: restore a newer checkpoint, or start another "
            "run.id with a longer retention",
        )  # fmt: skip
    if problems:
        return warn(
            "kept", "; ".join(problem.text for problem in problems),
            "lengthen retention.ms or retention.bytes of the topic now (kafka-configs.sh), or "
            "resume the run and let it train on",
        )  # fmt: skip
    return ok("kept", "the log has all that a redo and the open samples need")


def read_whole(bus: Bus, view: NeedsView, topic: Topic) -> None:
    """Fold all that a topic holds now.

    Raises:
        DeadlineError: nothing came for `READ_S`.
    """
    feed = Feed(bus, view, (topic,))
    try:
        feed.catch_up(READ_S)
    finally:
        feed.close()
