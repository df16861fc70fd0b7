"""Which records count: of samples the first ones, of `steps` those of the run's owner.

One rule for each, asked by everybody who reads these topics, so that a copy or a zombie's event is
void to all of them or to none; the audit, which checks the others, keeps its own. Whatever the
broker let through, an event of `steps` counts only if the newest claim (`TrainerStarted`) before it
in the log is of its own epoch: its writer was not fenced. And of the steps of one number the first
counts, as long as it is the next one.
"""

from __future__ import annotations

from rlstreams.schemas.events import (
    Event,
    PolicyPublished,
    Prompt,
    RedoDrifted,
    ScoredTrajectory,
    StepCompleted,
    TrainerStarted,
    Trajectory,
)


class FirstRecords:
    """Tells the first record of each sample by offset from its copies. One object for one topic.

    The records of a sample share their key, so they lie in one partition, and reading that in order
    is all that it takes. The first one counts whatever it says: if it cannot be used, its reader
    writes a dead letter, and the sample ends there. A later record is a copy, also where that one
    could have been used. The trainer's planner, whose state is made anew by reading, keeps the same
    rule by offsets (`Group.is_copy`).
    """

    def __init__(self) -> None:
        self._seen: dict[str, set[int]] = {}  # sample numbers by group

    def admits(self, event: Event) -> bool:
        """Whether `event` counts. One that is no stage of a sample always does."""
        stage = event.trajectory if isinstance(event, ScoredTrajectory) else event
        if not isinstance(stage, Prompt | Trajectory):
            return True
        seen = self._seen.setdefault(stage.group_id, set())
        if stage.sample in seen:
            return False
        seen.add(stage.sample)
        return True


class EpochGate:
    """Tells void events from valid ones by their epoch.

    Before the first claim everything passes: a recording may begin behind it.
    """

    def __init__(self) -> None:
        self.newest: int | None = None  # epoch of the newest claim

    def admits(self, event: Event) -> bool:
        """Whether `event` counts; a claim that does moves the gate.

        What has no epoch passes, and so does a publication: it lies in another topic, so its order
        against claims is not known.
        """
        epoch = getattr(event, "epoch", None)
        if epoch is None or isinstance(event, PolicyPublished):
            return True
        if isinstance(event, TrainerStarted):
            if self.newest is not None and epoch <= self.newest:
                return False
            self.newest = epoch
            return True
        return self.newest is None or bool(epoch == self.newest)


class StepsGate:
    """`EpochGate`, and the first of each step.

    Args:
        begins_anywhere: the events may begin behind the first claim or the first step, and leave
            steps out, as a recording of some of them does. Otherwise nothing counts before the
            first claim, and a step only if it is the one behind the last.
    """

    def __init__(self, *, begins_anywhere: bool = False) -> None:
        self._epochs = EpochGate()
        self._begins_anywhere = begins_anywhere
        self.last_step = 0  # the newest step that counted

    def admits(self, event: Event) -> bool:
        """Whether `event` counts; claims and steps that do move the gate.

        A drift is about the newest step's weights, from which the next step starts.
        """
        if not self._epochs.admits(event):
            return False
        if self._epochs.newest is None and not self._begins_anywhere:
            return False
        if isinstance(event, StepCompleted):
            return self._is_next(event.step)
        if isinstance(event, RedoDrifted) and not self._begins_anywhere:
            return 0 < event.step == self.last_step
        return True

    def _is_next(self, step: int) -> bool:
        is_next = step > self.last_step if self._begins_anywhere else step == self.last_step + 1
        if is_next:
            self.last_step = step
        return is_next
