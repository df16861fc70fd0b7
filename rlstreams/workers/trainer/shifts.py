"""A trainer's shifts on a device that it shares: between two steps its memory can leave and return.

Only the training loop knows when nothing of a step is under way, so it asks here at that point;
meanwhile the trainer reads, drops, serves weights from the host and reports as ever.
"""

from __future__ import annotations

from collections.abc import Callable

from rlstreams.workers.loop.lease import AWAITS_SHIFT, OFFLOADED
from rlstreams.workers.trainer.ledger_writer import LedgerWriter
from rlstreams.workers.trainer.training.resumable import Compute, Resumable
from rlstreams.workers.trainer.training.training import Training


class TrainerShifts:
    """State of the trainer's memory: where it is, and where it should be."""

    def __init__(self, training: Training, writer: LedgerWriter, compute: Compute) -> None:
        self._training = training
        self._writer = writer
        self._compute = compute
        self._is_wanted = True
        self._is_ready = False  # whether the redo is done
        self._is_over = False
        self.is_here = True

    def give_up(self) -> bool:
        """See `Sharing.give_up_device`."""
        self._is_wanted = False
        return not self.is_here

    def take(self) -> bool:
        """See `Sharing.take_device`; after the last step there is nothing to load."""
        self._is_wanted = True
        return (self.is_here and self._is_ready) or self._is_over

    def between_steps(self, may_wait: Callable[[], bool]) -> Resumable[None]:
        """Move the memory off the device if it is asked for, and wait until it is back.

        Args:
            may_wait: False: go on without the device.
        """
        self._is_ready = True
        if self._is_wanted:
            return
        yield from self._leave()
        while self._is_away():
            if not may_wait():
                return
            self._writer.set_state(OFFLOADED, AWAITS_SHIFT)
            yield None
        yield self._compute(self._training.learner.load_back)
        self.is_here = True

    def end(self) -> Resumable[None]:
        """Leave the device for good: other roles have work with the last step's weights."""
        self._is_over = True
        yield from self._leave()

    def _is_away(self) -> bool:
        return not self._is_wanted

    def _leave(self) -> Resumable[None]:
        yield self._compute(self._training.learner.off_load)
        self.is_here = False
