"""Logs in memory that hold the topics of a run."""

from __future__ import annotations

from rlstreams.streams.log.topics import TOPICS
from tests.memory.log import MemoryLog


def made_log(run: str = "run", partitions: int = 1, *, is_older: bool = False) -> MemoryLog:
    """All topics of a run, with as many partitions as may be: some have never more than one.

    Args:
        is_older: without those that older releases did not make.
    """
    log = MemoryLog()
    for topic in TOPICS:
        if is_older and topic.is_later:
            continue
        log.create(f"{run}.{topic.name}", 1 if topic.single_partition else partitions)
    return log
