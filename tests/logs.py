"""Logs in memory that hold the topics of a run."""

from __future__ import annotations

from rlstreams.streams.log.topics import TOPICS
from tests.memory.log import MemoryLog


def made_log(run: str = "run", partitions: int = 1) -> MemoryLog:
    """All topics of a run, with as many partitions as may be: some have never more than one."""
    log = MemoryLog()
    for topic in TOPICS:
        log.create(f"{run}.{topic.name}", 1 if topic.single_partition else partitions)
    return log
