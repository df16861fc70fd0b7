"""Join of prompts and steps to samples. Memory grows with the prompts, not with the answers."""

from __future__ import annotations

from typing import Any

from rlstreams.schemas.events import (
    EVALUATE,
    DeadLetter,
    GroupsDropped,
    Prompt,
    StepCompleted,
    Trajectory,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.lineage.fold import Outcome
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import STEPS
from rlstreams.streams.run.run_log import RunLog

_ALL = -1  # a fate of every sample of the group


class Join:
    """Reads `prompts`, `steps` and `dead-letters` once, then answers by sample."""

    def __init__(self, log: RunLog) -> None:
        self._prompts: dict[str, dict[str, Any]] = {}  # columns by group
        self._trained: dict[tuple[str, int], dict[str, Any]] = {}
        self._fates: dict[tuple[str, int], tuple[Outcome, str]] = {}  # and the reason
        for prompt in log.read(Prompt, skip_unreadable=True):
            self._prompt(prompt.event)
        ledger = Ledger(begins_anywhere=True, on_step=self._step, on_drop=self._drop)
        for record in log.read_topic(STEPS, skip_unreadable=True):
            ledger.apply(record.event)
        for letter in log.read(DeadLetter, skip_unreadable=True):
            event = letter.event
            self._ended(event.group_id, event.sample, Outcome.DEAD, event.reason)

    def columns(self, event: Trajectory) -> dict[str, Any]:
        """What other topics say of a sample; a column of which they say nothing is missing."""
        sample = event.group_id, event.sample
        trained = self._trained.get(sample)
        if trained is not None:
            own = {"outcome": str(Outcome.TRAINED), **trained}
        elif found := self._fates.get(sample) or self._fates.get((event.group_id, _ALL)):
            own = {"outcome": str(found[0]), "reason": found[1]}
        else:
            is_done = event.purpose == EVALUATE
            own = {"outcome": str(Outcome.EVALUATED) if is_done else "in flight"}
        return {**self._prompts.get(event.group_id, {}), **own}

    def _prompt(self, event: Prompt) -> None:
        told = {
            "prompt": event.text,
            "expected": event.answer,
            "metadata": event.metadata,
            "issued_at": event.issued_at_ms,
        }
        self._prompts.setdefault(event.group_id, told)

    def _step(self, event: StepCompleted, _: Position) -> None:
        for ref in event.samples:
            told = {
                "step": event.step,
                "advantage": ref.advantage,
                "staleness": event.policy_version - 1 - ref.oldest_policy_version,
                "made_version": event.policy_version,
            }
            self._trained.setdefault((ref.group_id, ref.sample), told)
        for absent in event.absent:
            self._ended(absent.group_id, absent.sample, Outcome.ABSENT, absent.reason)

    def _drop(self, event: GroupsDropped, _: Position) -> None:
        for group in event.groups:
            self._ended(group.group_id, _ALL, Outcome.DROPPED, group.reason)

    def _ended(self, group_id: str, sample: int, outcome: Outcome, reason: str) -> None:
        self._fates.setdefault((group_id, sample), (outcome, reason))
