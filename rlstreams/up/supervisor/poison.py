"""Detects a run in which most samples are dead-lettered: it would run forever and learn little.

Single bad samples are dead-lettered and replaced without stopping the run. But if a verifier fails
on every answer, or no prompt fits the engine, that repeats without end. A sample ends when it is
trained, dead-lettered, or dropped with its group; of the last ones that ended, at most a given
share may be dead-lettered.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial

from rlstreams.schemas.events import (
    TRAIN,
    DeadLetter,
    DroppedGroup,
    Event,
    GroupsDropped,
    StepCompleted,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.record import Position
from rlstreams.streams.views.dead import list_command
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.validation import is_group_number

TELL_EVERY_MS = 30_000  # of one reason
STEPS_WORTH = 3  # of samples, where the configuration names no window
POISONED = ("dead_samples", "numerics", "memory")  # why a group was dropped
_FINE = ""  # trained, or dropped for a reason that is not in POISONED
_WITH_ITS_GROUP = "lost with their group"


class PoisonWatch:
    """A view: what became of the newest samples, and of each reason now and then
    a dead letter in words.

    Args:
        config: of the run.
        since_ms: what was written before it is not looked at, so that a run which is resumed once
            its verifier is mended begins with a clean window. Wall clock, ms since the epoch.
    """

    def __init__(self, config: RunConfig, since_ms: int = 0) -> None:
        self._group_size = config.prompts.group_size
        self._max_share = config.dead_letters.max_share
        step_samples = config.trainer.groups_per_step * self._group_size
        size = config.dead_letters.window_samples or STEPS_WORTH * step_samples
        self._ended: deque[str] = deque(maxlen=size)  # per sample why it was set aside, or _FINE
        self._open: dict[str, dict[int, str]] = {}  # letters of groups that are not closed
        self._ledger = Ledger(begins_anywhere=True, on_step=self._step, on_drop=self._dropped)
        self._since_ms = since_ms
        self._examples: dict[str, str] = {}  # by reason: the newest
        self._told: dict[str, tuple[int, int]] = {}  # by reason: when, ms; dead letters since
        self._list = partial(list_command, config.folder)
        self.news = ""  # of the newest dead letter that was told of, in words

    def apply(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, DeadLetter) and event.at_ms >= self._since_ms:
            self._letter(event)
        else:
            self._ledger.apply(event)

    def _dropped(self, event: GroupsDropped, _: Position) -> None:
        for group in event.groups:
            self._drop(group, is_new=event.dropped_at_ms >= self._since_ms)

    @property
    def problem(self) -> str:
        """Why the run should stop; empty while it need not."""
        size = self._ended.maxlen or 0
        counts = Counter(reason for reason in self._ended if reason != _FINE)
        num = counts.total()
        if len(self._ended) < size or num <= self._max_share * size:
            return ""
        told = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        main = next((r for r, _ in counts.most_common() if r in self._examples), "")
        example = f"; for example {self._examples[main]}" if main else ""
        return (
            f"{num} of the last {size} samples were dead-lettered ({100 * num / size:.0f} %, "
            f"dead_letters.max_share is {self._max_share:g}): {told}{example}"
        )

    def _letter(self, event: DeadLetter) -> None:
        is_known = event.group_id != ""
        name = f"sample {event.group_id}/{event.sample}" if is_known else "a foreign record"
        told = f"{name} was set aside by {event.worker}, {event.reason}: {event.detail}"
        self._examples[event.reason] = told
        at_ms, num = self._told.get(event.reason, (-TELL_EVERY_MS, 0))
        self._told[event.reason] = at_ms, num + 1
        if event.at_ms >= at_ms + TELL_EVERY_MS:
            more = f"{num + 1} more for reason {event.reason}, the newest: " if num else ""
            self._told[event.reason] = event.at_ms, 0
            self.news = f"{more}{told} ({self._list(event.reason)})"
        if not is_group_number(event.group_id) or event.purpose != TRAIN:
            return
        group = self._open.setdefault(event.group_id, {})
        if self._ledger.is_closed(int(event.group_id)):  # it was counted when its group closed
            del self._open[event.group_id]
        elif event.sample not in group:
            group[event.sample] = event.reason
            self._ended.append(event.reason)

    def _step(self, event: StepCompleted, _: Position) -> None:
        is_new = event.finished_at_ms >= self._since_ms
        for absent in event.absent if is_new else ():
            if absent.sample not in self._open.get(absent.group_id, {}):
                self._ended.append(absent.reason)
        for group_id in {sample.group_id for sample in event.samples}:
            self._open.pop(group_id, None)
        if is_new:
            self._ended.extend([_FINE] * len(event.samples))

    def _drop(self, group: DroppedGroup, *, is_new: bool) -> None:
        num_left = self._group_size - len(self._open.pop(group.group_id, {}))
        if is_new:
            is_poisoned = group.reason in POISONED
            self._ended.extend([_WITH_ITS_GROUP if is_poisoned else _FINE] * num_left)
