"""The rules by which records count: a sample's first ones; in `steps`, for the audit, the owner's.

One rule, asked by everybody who reads samples, mostly through the fold `streams.samples`: a copy is
void to all of them or to none. The audit,
which checks the others, folds `steps` by itself and keeps a rule of its own for samples.
"""

from __future__ import annotations

from rlstreams.schemas.events import (
    Event,
    PolicyPublished,
    PolicyStored,
    Prompt,
    ScoredTrajectory,
    TrainerStarted,
    Trajectory,
)

_BITS = 256  # samples of a group that are kept as bits


class FirstRecords:
    """Distinguishes each sample's first record by offset from copies. One object for one topic.

    The records of a sample share their key, so they lie in one partition, which is read in order.
    The first one counts whatever its content: if it cannot be used, its reader writes a dead
    letter, and the sample ends there. The trainer's planner keeps the same rule by offsets.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # sample numbers by group, a bit for each
        self._large: set[tuple[str, int]] = set()  # samples whose number has no bit

    def admits(self, event: Event) -> bool:
        """Whether `event` counts. An event that is no stage of a sample always does."""
        stage = event.trajectory if isinstance(event, ScoredTrajectory) else event
        if not isinstance(stage, Prompt | Trajectory):
            return True
        return self.is_first(stage.group_id, stage.sample)

    def is_first(self, group_id: str, sample: int) -> bool:
        """Whether this is the sample's first record; call it once a record."""
        if not 0 <= sample < _BITS:
            name = group_id, sample
            is_new = name not in self._large
            self._large.add(name)
            return is_new
        seen, bit = self._seen.get(group_id, 0), 1 << sample
        self._seen[group_id] = seen | bit
        return not seen & bit


def is_next_epoch(claim: TrainerStarted, newest: int, *, begins_anywhere: bool = False) -> bool:
    """Whether a claim counts behind one of epoch `newest`.

    A trainer reads the ledger to its end and takes the next epoch, so any other claim is forged.

    Args:
        begins_anywhere: events may be missing between the two, as in a recording of some steps.
    """
    return claim.epoch > newest if begins_anywhere else claim.epoch == newest + 1


class EpochGate:
    """Distinguishes void events from valid ones by their epoch.

    Before the first claim everything passes: a recording may begin behind it.
    """

    def __init__(self) -> None:
        self.newest: int | None = None  # epoch of the newest claim

    def admits(self, event: Event) -> bool:
        """Whether `event` counts; a claim that counts moves the gate.

        Events without an epoch pass, and so does a publication: it lies in another topic, so its
        order against claims is not known.
        """
        epoch = getattr(event, "epoch", None)
        if epoch is None or isinstance(event, PolicyPublished | PolicyStored):
            return True
        if isinstance(event, TrainerStarted):
            if self.newest is not None and not is_next_epoch(event, self.newest):
                return False
            self.newest = event.epoch
            return True
        return self.newest is None or bool(epoch == self.newest)
