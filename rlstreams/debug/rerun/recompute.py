"""The weights of a run, computed once more from its own log: claims nothing, writes nothing.

    for step in recompute(bus, config):
        print(step.step, step.is_equal)

It takes the path of a redo (`redo.redo_step`), so under the recorded versions of hardware and
libraries each hash is the ledger's, however often the trainer was killed on the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.foreign import ForeignRecords
from rlstreams.workers.model.device import nearest_devices
from rlstreams.workers.trainer.claim import STEPS_PARTITION, read_to_end
from rlstreams.workers.trainer.parallel.team import team_of
from rlstreams.workers.trainer.redo.redo import plan_redo, read_step, redo_step
from rlstreams.workers.trainer.redo.restore import objection
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest
from rlstreams.workers.trainer.training.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """One step, computed again."""

    step: int
    weight_hash: str
    recorded_hash: str  # in force in the ledger

    @property
    def is_equal(self) -> bool:
        """Whether the ledger tells the truth about these weights."""
        return self.weight_hash == self.recorded_hash


def recompute(bus: Bus, config: RunConfig, *, from_step: int = 0) -> Iterator[Recomputed]:
    """Each committed step after `from_step`, in order, as far as `steps` goes now.

    Args:
        from_step: 0 begins with the model folder; else a step that a checkpoint holds.

    Raises:
        ConfigError: no confirmed checkpoint of `from_step`.
        RedoError, OffsetGoneError, RecordGoneError: the log is not, or no longer, the run's.
    """
    ledger = Ledger(keeps_steps=True)
    with bus.reader({STEPS_PARTITION: 0}) as reader:
        read_to_end(bus, reader, ledger, ForeignRecords("recompute", bus.schemas()))
    section = config.trainer
    device, gpus = nearest_devices("trainer.device", section.device, section.ranks)
    training = Training(
        model_folder(config.model.path),
        section,
        config.model.threads,
        device,
        config.model.dtype,
        team=team_of(gpus),
    )
    with contextlib.closing(training):
        if from_step:
            _load(config, ledger, training, from_step)
        for fact in plan_redo(ledger, from_step):
            event, payloads = read_step(bus, fact)
            redone = redo_step(training, ledger, fact, event, payloads)
            yield Recomputed(
                step=fact.step, weight_hash=redone.weight_hash, recorded_hash=fact.weight_hash
            )


def _load(config: RunConfig, ledger: Ledger, training: Training, step: int) -> None:
    store = CheckpointStore(Path(config.folder) / "checkpoints")

    def against(manifest: Manifest) -> str:
        if manifest.step != step:
            return f"it is of step {manifest.step}"
        return objection(config.run.id, ledger, manifest)

    found = store.newest(against)
    if found.manifest is None:
        seen = "; ".join(f"{passed.name}: {passed.reason}" for passed in found.passed_over)
        raise ConfigError(f"no checkpoint of step {step} to begin with ({seen or 'none at all'})")
    training.restore(store, found.manifest)
