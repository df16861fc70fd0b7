"""The fold of `steps`: who may train, what was trained, what is closed. Pure.

`StepCompleted` is the only authority. Which events count: `StepsGate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlstreams.schemas.events import (
    ClosedGroups,
    Event,
    GroupsDropped,
    PartitionPosition,
    RedoDrifted,
    StepCompleted,
    StepsRedone,
    TrainerHeartbeat,
    TrainerStarted,
)
from rlstreams.streams.log.fencing import StepsGate
from rlstreams.streams.log.record import Position

LEDGER_EVENTS = (
    TrainerStarted, StepCompleted, GroupsDropped, TrainerHeartbeat, RedoDrifted, StepsRedone
)  # fmt: skip
EXPIRED = "expired"  # a drop's reason: retention has removed records of groups that were open


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFact:
    """A completed step: what it made, where its event lies, and what its redo has to read."""

    step: int
    epoch: int
    policy_version: int
    weight_hash: str  # in force: of the newest drift at this step, else as the step recorded it
    position: Position
    oldest: Mapping[int, int]  # partition of scored-trajectories -> lowest offset of a sample


class Ledger:
    """State after the events so far."""

    def __init__(self) -> None:
        self._gate = StepsGate()
        self.claim: TrainerStarted | None = None
        self.claims: dict[int, TrainerStarted] = {}  # by epoch: each names its configuration
        self.heartbeat: TrainerHeartbeat | None = None
        self.steps: dict[int, StepFact] = {}
        self.closed = ClosedGroups(watermark=0)
        self.positions: tuple[PartitionPosition, ...] = ()
        self.policy_version = 0
        self.weight_hash = ""
        self.drifted_step = 0  # the newest step whose weights a redo replaced
        self.hashes: dict[int, str] = {}  # by version, of all versions so far
        self.num_void = 0

    @property
    def epoch(self) -> int:
        """The newest epoch; the first claim makes it 1."""
        return self.claim.epoch if self.claim else 0

    @property
    def last_step(self) -> int:
        """The newest completed step; 0 before the first."""
        return self._gate.last_step

    def apply(self, event: Event, position: Position) -> bool:
        """Fold one event in log order; False if it is void, or has no place here."""
        if not (isinstance(event, LEDGER_EVENTS) and self._gate.admits(event)):
            self.num_void += 1
            return False
        if isinstance(event, TrainerStarted):
            if self.claim is None:
                self.policy_version, self.weight_hash = event.policy_version, event.weight_hash
                self.hashes[event.policy_version] = event.weight_hash
            self.claim = self.claims[event.epoch] = event
            self.heartbeat = None
        elif isinstance(event, StepCompleted):
            self._step(event, position)
        elif isinstance(event, GroupsDropped):
            self.closed = event.closed
            if any(group.reason == EXPIRED for group in event.groups):
                self.positions = ()  # nobody needs what lies there any more
        elif isinstance(event, TrainerHeartbeat):
            self.heartbeat = event
        elif isinstance(event, RedoDrifted):
            self._drift(event)
        return True

    def _drift(self, event: RedoDrifted) -> None:
        """Replace the newest step's weights: the next step starts from the drifted ones."""
        fact = replace(self.steps[event.step], weight_hash=event.actual_hash)
        self.steps[event.step] = fact
        self.drifted_step = event.step
        self.policy_version, self.weight_hash = event.policy_version, event.actual_hash
        self.hashes[event.policy_version] = event.actual_hash

    def _step(self, event: StepCompleted, position: Position) -> None:
        self.steps[event.step] = StepFact(
            step=event.step,
            epoch=event.epoch,
            policy_version=event.policy_version,
            weight_hash=event.weight_hash,
            position=position,
            oldest=_oldest(event),
        )
        self.closed, self.positions = event.closed, event.positions
        self.policy_version, self.weight_hash = event.policy_version, event.weight_hash
        self.hashes[event.policy_version] = event.weight_hash


def _oldest(event: StepCompleted) -> Mapping[int, int]:
    oldest: dict[int, int] = {}
    for sample in event.samples:
        oldest[sample.partition] = min(sample.offset, oldest.get(sample.partition, sample.offset))
    return oldest
