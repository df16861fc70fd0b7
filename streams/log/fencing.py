"""Which events of `steps` a fenced trainer wrote: the rule of the audit, which folds by itself."""

from __future__ import annotations

from rlstreams.schemas.events import Event, PolicyPublished, TrainerStarted


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
