"""Detects a run in which most samples are dead-lettered: it would run forever and learn little.

Single bad samples are dead-lettered and replaced without stopping the run. But if a verifier fails
on every answer, or no prompt fits the engine, that repeats without end. A sample ends when it is
trained, dead-lettered, or dropped with its group; of the last ones that ended, at most a given
share may be dead-lettered.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial

from rlstreams.schemas.events import DeadLetter, Event
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.samples.life import EndedCount, Outcome
from rlstreams.streams.views.dead import list_command
from rlstreams.streams.views.folds import Folds
from rlstreams.workers.config.run import RunConfig

NEWS_EVERY_MS = 30_000  # of one reason
STEPS_WORTH = 3  # of samples, where the configuration names no window
POISONED = ("dead_samples", "numerics", "memory")  # why a group was dropped
_FINE = ""  # trained, or dropped for a reason that is not in POISONED
_WITH_ITS_GROUP = "lost with their group"


class PoisonWatch:
    """Watches how the newest samples end; of each reason it announces a dead letter now and then.

    Args:
        config: of the run.
        folds: which others feed, each event before it comes here.
        is_live: False: no event is looked at until this is set, so that a run which is
            resumed once its verifier is mended begins with a clean window.
    """

    def __init__(self, config: RunConfig, folds: Folds, *, is_live: bool = True) -> None:
        self._max_share = config.dead_letters.max_share
        step_samples = config.trainer.groups_per_step * config.prompts.group_size
        size = config.dead_letters.window_samples or STEPS_WORTH * step_samples
        self._ended: deque[str] = deque(maxlen=size)  # per sample why it was set aside, or _FINE
        folds.samples.listen(self._add)
        self.is_live = is_live
        self._examples: dict[str, str] = {}  # by reason: the newest
        self._announced: dict[str, tuple[int, int]] = {}  # by reason: when, ms; dead letters since
        self._list = partial(list_command, config.folder)
        self.news = ""  # the dead letter announced last, in words

    def apply(self, event: Event) -> None:
        """Take one event: a dead letter is news."""
        if isinstance(event, DeadLetter) and self.is_live:
            self._announce(event)

    def _add(self, end: EndedCount) -> None:
        """Note samples that ended; a drop for a reason that is its own is no poison."""
        if not self.is_live:
            return
        reason = end.reason if end.outcome in (Outcome.DEAD, Outcome.ABSENT) else _FINE
        if end.outcome is Outcome.DROPPED and end.reason in POISONED:
            reason = _WITH_ITS_GROUP
        self._ended.extend([reason] * end.num)

    @property
    def problem(self) -> str:
        """Why the run should stop; empty while it need not."""
        size = self._ended.maxlen or 0
        counts = Counter(reason for reason in self._ended if reason != _FINE)
        num = counts.total()
        if len(self._ended) < size or num <= self._max_share * size:
            return ""
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        main = next((r for r, _ in counts.most_common() if r in self._examples), "")
        example = f"; for example {self._examples[main]}" if main else ""
        return (
            f"{num} of the last {size} samples were dead-lettered ({100 * num / size:.0f} %, "
            f"dead_letters.max_share is {self._max_share:g}): {reasons}{example}"
        )

    def _announce(self, event: DeadLetter) -> None:
        is_known = event.group_id != ""
        name = f"sample {sample_name(event)}" if is_known else "a foreign record"
        text = f"{name} was set aside by {event.worker}, {event.reason}: {event.detail}"
        self._examples[event.reason] = text
        at_ms, num = self._announced.get(event.reason, (-NEWS_EVERY_MS, 0))
        self._announced[event.reason] = at_ms, num + 1
        if event.at_ms >= at_ms + NEWS_EVERY_MS:
            more = f"{num + 1} more for reason {event.reason}, the newest: " if num else ""
            self._announced[event.reason] = event.at_ms, 0
            self.news = f"{more}{text} ({self._list(event.reason)})"
