"""The folds of a run's topics, made once for all screens, counts and watches of a process."""

from __future__ import annotations

from rlstreams.schemas.events import ControlState, Event, PolicyPublished
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.record import Position
from rlstreams.streams.samples.fold import OPEN, Samples
from rlstreams.streams.workers import Workers


class Folds:
    """One ledger, one fold of samples and one of workers, fed with the same events.

    Views, watches and screens query them, and fold nothing again.

    Args:
        keeps: number of samples to keep, see `Samples`.
        group_size: size of training groups, where prompts are not read.
    """

    def __init__(self, *, keeps: int = OPEN, group_size: int = 0) -> None:
        self.ledger = Ledger(begins_anywhere=True, keeps_steps=True)
        self.samples = Samples(self.ledger, keeps=keeps, group_size=group_size)
        self.workers = Workers()
        self.ledger.listen(
            on_step=lambda step, _: self.workers.works(step.instance, step.finished_at_ms)
        )
        self.published: set[int] = set()  # versions
        self.control = "running"  # desired state in the newest event of `control`
        self.why_control = ""  # its reason, if it has one

    @property
    def trainer_state(self) -> str:
        """State in the trainer's newest heartbeat."""
        return self.ledger.heartbeat.state if self.ledger.heartbeat else ""

    def apply(self, event: Event, position: Position | None = None) -> bool:
        """Take one event, and its record's position if known.

        Returns:
            False: a copy, a void event, or about no sample.
        """
        self.workers.apply(event)
        if isinstance(event, PolicyPublished):
            self.published.add(event.policy_version)
        elif isinstance(event, ControlState):
            self.control, self.why_control = event.state, event.reason
        return self.samples.apply(event, position)
