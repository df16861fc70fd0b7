"""What a recorded run's trainer did, in order: the fold of `steps`, with void events left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlstreams.schemas.events import (
    DroppedGroup,
    GroupsDropped,
    RedoDrifted,
    StepCompleted,
    TrainerStarted,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import STEPS
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.workers.config.load import from_json
from rlstreams.workers.config.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Steps, claims and drops that count."""

    steps: tuple[StepCompleted, ...]  # 1, 2, 3, ...
    claims: dict[int, TrainerStarted]  # by epoch
    dropped: dict[int, tuple[DroppedGroup, ...]] = field(default_factory=dict)  # after which step
    drifts: dict[int, RedoDrifted] = field(default_factory=dict)  # by step

    def config_of(self, step: StepCompleted) -> RunConfig:
        """The configuration in force."""
        return from_json(self.claims[step.epoch].config)

    def hash_of(self, step: StepCompleted) -> str:
        """The weights that the run went on with."""
        drift = self.drifts.get(step.step)
        return step.weight_hash if drift is None else drift.actual_hash


def history_of(recording: Recording) -> History:
    """Fold the recorded `steps`.

    Raises:
        NotRecordedError: the recording holds no claim, or steps are missing in between.
    """
    steps: list[StepCompleted] = []
    dropped: dict[int, tuple[DroppedGroup, ...]] = {}
    drifts: dict[int, RedoDrifted] = {}

    def drop(event: GroupsDropped, _: Position) -> None:
        dropped[ledger.last_step] = dropped.get(ledger.last_step, ()) + event.groups

    ledger = Ledger(
        on_step=lambda event, _: steps.append(event),
        on_drop=drop,
        on_drift=lambda event, _: drifts.update({event.step: event}),
    )
    for raw in recording.records([STEPS.name]):
        if event := recording.event(raw):
            ledger.apply(event, raw.position)
    if not ledger.claims:
        raise NotRecordedError(f"{recording.folder} holds no claim of a trainer in {STEPS.name}")
    if ledger.num_void and not steps:
        raise NotRecordedError(
            f"{recording.folder} does not begin with step 1: the trainer cannot be replayed from "
            "the middle; use rerun-step, which starts from a checkpoint"
        )
    return History(steps=tuple(steps), claims=dict(ledger.claims), dropped=dropped, drifts=drifts)


def eras(history: History, last_step: int) -> list[Sequence[StepCompleted]]:
    """Steps up to `last_step`, parted where the trainer's configuration changed."""
    parts: list[list[StepCompleted]] = []
    before = None
    for step in history.steps[:last_step]:
        now = _trainer_of(history, step)
        if now != before:
            parts.append([])
        parts[-1].append(step)
        before = now
    return [tuple(part) for part in parts]


def _trainer_of(history: History, step: StepCompleted) -> object:
    from dataclasses import replace

    config = history.config_of(step)
    return replace(config.trainer, steps=1), config.model
