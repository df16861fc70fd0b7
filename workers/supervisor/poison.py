"""Notices a run in which samples are only set aside: it would go on for ever and learn nothing.

Single bad samples are set aside and replaced, and stop nobody. But where a verifier fails on every
answer, or no prompt fits the engine, that repeats without end.
"""

from __future__ import annotations

from schemas.events import TRAIN, DeadLetter, Event, StepCompleted

STEPS_WORTH = 3  # of samples set aside, without a step between


class PoisonWatch:
    """A view: dead letters since the last step.

    Args:
        step_samples: samples of one step.
    """

    def __init__(self, step_samples: int) -> None:
        self._limit = STEPS_WORTH * step_samples
        self._num_letters = 0
        self._newest = ""
        self._told: set[str] = set()
        self.news = ""  # the first letter of its reason, in words; until the next one
        self.problem = ""  # why the run should stop; empty while it need not

    def apply(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, StepCompleted):
            self._num_letters, self.problem = 0, ""
        if not isinstance(event, DeadLetter) or event.purpose != TRAIN:
            return
        self._num_letters += 1
        self._newest = f"{event.worker}, {event.reason}: {event.detail}"
        if event.reason not in self._told:
            self._told.add(event.reason)
            is_known = event.group_id != ""
            name = f"sample {event.group_id}/{event.sample}" if is_known else "a foreign record"
            self.news = f"{name} was set aside by {self._newest}"
        if self._num_letters >= self._limit:
            self.problem = (
                f"{self._num_letters} samples were set aside without a step between; "
                f"the last by {self._newest}"
            )
