"""Recovery of a trainer: checkpoints in time for retention, and the redo from the newest one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from rlstreams.schemas.events import PassedOverCheckpoint
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.log.topics import SCORED
from rlstreams.workers.loop.context import Context
from rlstreams.workers.trainer.expired import refuse_expired
from rlstreams.workers.trainer.family import branch_command
from rlstreams.workers.trainer.ledger_writer import LedgerWriter
from rlstreams.workers.trainer.redo.redo import Redone, redo
from rlstreams.workers.trainer.redo.retention import (
    RedoSpan,
    RetentionError,
    check_redo,
)
from rlstreams.workers.trainer.training.checkpoint import (
    CheckpointStore,
    Manifest,
    objection,
)
from rlstreams.workers.trainer.training.resumable import Compute, Resumable
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.channel import WeightError

LOOK_EVERY_S = 1.0  # at the age of the records that a redo needs


class Recovery:
    """Checkpoints of one run, and the redo from them.

    Raises:
        RetentionError: samples that were not trained on yet are gone from the log.
    """

    def __init__(
        self,
        context: Context,
        bus: Bus,
        ledger: Ledger,
        training: Training,
        compute: Compute,
        writer: LedgerWriter,
    ) -> None:
        self._run = context.config.run.id
        self._writer = writer
        self._section = context.config.trainer
        self._bus = bus
        self._ledger = ledger
        self._training = training
        self._compute = compute
        self._log = context.log
        self._store = CheckpointStore(context.folder / "checkpoints")
        self._span = RedoSpan(bus.settings(SCORED.name))
        self._next_look = 0.0
        self.saved_step = self._begun_step = 0  # 0: version 0 is the model folder
        self._files = ThreadPoolExecutor(1, "trainer-checkpoint")
        self._written: Future[Manifest] | None = None  # None: nothing is being written
        refuse_expired(bus, ledger)

    def come_back(self) -> Resumable[Redone]:
        """Load the newest checkpoint that the ledger confirms, and redo the steps since.

        Where a redo must be exact it ends at the first unequal step.

        Raises:
            RetentionError, RedoError: the log no longer has, or never had, the records of the
                ledger.
        """
        begins, passed_over = yield self._compute(self._restore)
        for passed in passed_over:
            self._log.warning(
                "checkpoint_passed_over", checkpoint=passed.checkpoint, reason=passed.reason
            )
        facts = [
            fact
            for step, fact in self._ledger.steps.items()
            if step > self.saved_step and not self._ledger.is_disowned(step)
        ]
        try:
            check_redo(facts, self._bus.beginnings(SCORED.name), begins)
        except RetentionError as err:
            for passed in passed_over:
                err.add_note(f"checkpoint {passed.checkpoint} was passed over: {passed.reason}")
            raise
        redone = yield from redo(
            self._bus,
            self._ledger,
            self._training,
            self._compute,
            while_waiting=self._writer.while_reading,
            used=self._span.add,
            stop_at_unequal=self._section.is_redo_exact,
        )
        return replace(redone, passed_over=passed_over)

    def _restore(self) -> tuple[str, tuple[PassedOverCheckpoint, ...]]:
        """Load the newest checkpoint that is whole and confirmed, or stay at the model folder; the
        start of the redo, for people, and newer checkpoints that were passed over."""
        self._store.clean(self._ledger.epoch)
        unfit: dict[str, str] = {}  # whole and confirmed, but not this model's

        def against(manifest: Manifest) -> str:
            return unfit.get(manifest.name) or objection(self._run, self._ledger, manifest)

        while True:
            found = self._store.newest(against)
            manifest = found.manifest
            if manifest is None:
                self._refuse_no_base(found.passed_over)
                return "version 0", found.passed_over
            try:
                self._training.restore(self._store, manifest)
            except (WeightError, ValueError) as err:
                unfit[manifest.name] = str(err)
            else:
                self.saved_step = self._begun_step = manifest.step
                return f"checkpoint {manifest.name} of step {manifest.step}", found.passed_over

    def _refuse_no_base(self, passed_over: Sequence[PassedOverCheckpoint]) -> None:
        """Refuse to redo a branch from the model folder: it begins with its checkpoint.

        Raises ConfigError: this run is a branch, and has no checkpoint to start from.
        """
        if (branch := self._ledger.branch) is None:
            return
        wrong = [f"{passed.checkpoint}: {passed.reason}" for passed in passed_over]
        raise ConfigError(
            f"run {self._run!r} is a branch of {branch.parent!r} at step {branch.step}, and no "
            f"checkpoint of that step or a later one can be used ({'; '.join(wrong) or 'none'}): "
            "put it back, or branch again under another name: "
            f"{branch_command(branch.parent_place, branch.step)}"
        )

    def used(self, raws: Iterable[RawRecord]) -> None:
        """Note the records of the newest step."""
        self._span.add(raws)

    def is_due(self, step: int, ends: Callable[[], Mapping[Partition, int]]) -> bool:
        """Whether to write a checkpoint of `step`, the newest: by count, or because of retention.

        Args:
            ends: next offsets to read; asked for at most once a second.
        """
        if step in (self.saved_step, self._begun_step):
            return False
        if step % self._section.checkpoint_every == 0:
            return True
        if self._written is not None or (now_s := time.monotonic()) < self._next_look:
            return False
        self._next_look = now_s + LOOK_EVERY_S
        if reason := self._span.why_save(ends(), now_ms()):
            self._log.info("checkpoint_early", step=step, reason=reason)
        return bool(reason)

    def begin(self, step: int, policy_version: int) -> Resumable[None]:
        """Copy the present weights and optimizer to the host, and have them written as a checkpoint
        beside the next steps; one at a time. Nothing, if there is one of their step.

        Call it only after the step's commit: a checkpoint is never ahead of the log.
        """
        if step in (self.saved_step, self._begun_step):
            return
        yield from self.finish()
        self._writer.set_state("saving", f"a checkpoint of step {step}")
        manifest = Manifest(
            run=self._run,
            epoch=self._ledger.epoch,
            step=step,
            policy_version=policy_version,
            weight_hash=self._training.weight_hash,
        )
        weights, optimizer = yield self._compute(self._training.copied)
        self._begun_step = step
        self._written = self._files.submit(self._store.save, manifest, weights, optimizer)
        self._span.clear()

    def look(self) -> Resumable[None]:
        """Count a checkpoint that is whole by now, and remove older ones: only a trainer that is
        still the owner after it does.

        Raises:
            OSError: it could not be written.
        """
        if self._written is None or not self._written.done():
            return
        self._written.result()
        self._written, self.saved_step = None, self._begun_step
        self._writer.prove()
        yield self._files.submit(
            self._store.prune, self._section.checkpoints_kept, self._ledger.epoch
        )
        self._writer.saved()

    def finish(self) -> Resumable[None]:
        """Wait for the checkpoint that is being written, if any; then as `look`."""
        if self._written is None:
            return
        self._writer.set_state("saving", f"a checkpoint of step {self._begun_step}")
        yield self._written
        yield from self.look()

    def close(self) -> None:
        """Begin to write nothing more."""
        self._files.shutdown(wait=False, cancel_futures=True)
