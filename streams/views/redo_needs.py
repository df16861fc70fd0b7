"""Which records a run still needs, and which retention settings would delete them. Pure.

A restarted trainer rereads the records used by the steps since the newest checkpoint, and every
sample that is waiting for a step. Retention knows of neither: it deletes whole segments from the
beginning of a partition, by age and by size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlstreams.schemas.events import Event, StepCompleted
from rlstreams.streams.ledger import Ledger, oldest_offsets
from rlstreams.streams.log.record import LogRange, Partition, Position
from rlstreams.streams.log.topics import SCORED

USED_UP = 0.5  # share of its retention after which a record that is needed is told of


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """A topic's retention; -1: none."""

    retention_ms: int = -1
    retention_bytes: int = -1  # per partition

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Retention:
        """From a topic's configuration in Kafka."""
        return cls(
            retention_ms=int(settings.get("retention.ms", "-1")),
            retention_bytes=int(settings.get("retention.bytes", "-1")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The oldest record of a partition that is needed."""

    offset: int
    since_ms: int  # a time at which it was there already
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A record that is needed and gone, or will be gone before long."""

    text: str
    is_gone: bool = False


class NeedsView:
    """Folds `steps`.

    Args:
        checkpoint_every: steps between checkpoints. What it says of redo is an upper bound: the
            trainer writes one earlier where retention demands it.
    """

    def __init__(self, checkpoint_every: int) -> None:
        self._every = checkpoint_every
        self._ledger = Ledger(begins_anywhere=True, on_step=self._step)
        # Since the last checkpoint, by number: when it ended, and its oldest record by partition.
        self._steps: dict[int, tuple[int, Mapping[Partition, int]]] = {}
        self._last: StepCompleted | None = None

    def apply(self, event: Event) -> None:
        """Take one event; all but valid steps are passed by."""
        self._ledger.apply(event)

    def _step(self, event: StepCompleted, _: Position) -> None:
        self._last = event
        oldest = {Partition(SCORED.name, n): at for n, at in oldest_offsets(event).items()}
        self._steps[event.step] = event.finished_at_ms, oldest
        saved = event.step - event.step % self._every
        self._steps = {step: at for step, at in self._steps.items() if step > saved}

    @property
    def needs(self) -> Mapping[Partition, Need]:
        """By partition; empty before the first step."""
        found: dict[Partition, Need] = {}
        if self._last is None:
            return found
        for position in self._last.positions:
            partition = Partition(position.topic, position.partition)
            found[partition] = Need(
                offset=position.offset,
                since_ms=self._last.finished_at_ms,
                why=f"waits for step {self._last.step + 1}",
            )
        for number, (event_ms, oldest) in sorted(self._steps.items(), reverse=True):
            for partition, offset in oldest.items():
                if partition not in found or offset <= found[partition].offset:
                    found[partition] = Need(
                        offset=offset,
                        since_ms=event_ms,
                        why=f"is needed to redo step {number}",
                    )
        return found


def retention_problems(
    needs: Mapping[Partition, Need],
    kept: Mapping[Partition, LogRange],
    retention: Mapping[str, Retention],
    now_ms: int,
) -> Iterable[Problem]:
    """Records that are gone, and those that have used up half of their retention."""
    for partition, need in sorted(needs.items()):
        holds = kept.get(partition)
        if holds is None or need.offset >= holds.end:
            continue
        name = f"{partition}@{need.offset}, which {need.why},"
        limit = retention.get(partition.topic, Retention())
        if need.offset < holds.begin:
            yield Problem(
                text=f"{name} is gone: the first record kept is {holds.begin}", is_gone=True
            )
            continue
        age_ms = now_ms - need.since_ms
        if 0 <= limit.retention_ms <= age_ms / USED_UP:
            yield Problem(
                text=f"{name} is {age_ms / 3_600_000:.3g} h old, and retention.ms removes it after "
                f"{limit.retention_ms / 3_600_000:.3g} h"
            )
        above = holds.num_bytes * (holds.end - need.offset) / max(1, holds.end - holds.begin)
        if 0 <= limit.retention_bytes <= above / USED_UP:
            yield Problem(
                text=f"{name} has about {above / 1e6:.0f} MB above it, and retention.bytes removes "
                f"it at {limit.retention_bytes / 1e6:.0f} MB"
            )
