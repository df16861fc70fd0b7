"""Which checkpoint a trainer starts from: the newest that the ledger confirms."""

from __future__ import annotations

from dataclasses import dataclass

from rlstreams.streams.ledger import Ledger
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest, PassedOver
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.channel import WeightError


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Where a trainer stands before redo."""

    step: int  # 0: the model folder
    checkpoint: str  # for people
    passed_over: tuple[PassedOver, ...]


def objection(run: str, ledger: Ledger, manifest: Manifest) -> str:
    """What the ledger has against a checkpoint, or "". Pure.

    A trainer that was stopped, and wakes after its successor's claim, may still finish writing a
    checkpoint. If it holds the committed weights of a step that was committed in its own time, or
    before, it is as good as any. Everything else of its making is refused here.
    """
    fact = ledger.steps.get(manifest.step)
    if manifest.run != run:
        return f"it is of run {manifest.run!r}, this is {run!r}"
    if manifest.epoch not in ledger.claims:
        return f"epoch {manifest.epoch} has no claim in the ledger"
    if fact is None:
        return f"step {manifest.step} is not in the ledger, whose newest is {ledger.last_step}"
    if fact.epoch > manifest.epoch:
        return (
            f"step {manifest.step} was done in epoch {fact.epoch}: "
            f"epoch {manifest.epoch}, which wrote it, was fenced before"
        )
    if fact.weight_hash != manifest.weight_hash:
        return (
            f"step {manifest.step} with weights {manifest.weight_hash[:12]} "
            f"is not what the ledger committed: {fact.weight_hash[:12]}"
        )
    return ""


def restore(store: CheckpointStore, run: str, ledger: Ledger, training: Training) -> Restored:
    """Load the newest checkpoint that is whole and confirmed, or stay at the model folder.

    Args:
        ledger: with the caller's own claim as its newest.
    """
    store.clean(ledger.epoch)
    unfit: dict[str, str] = {}  # whole and confirmed, and yet not this model's

    def against(manifest: Manifest) -> str:
        return unfit.get(manifest.name) or objection(run, ledger, manifest)

    while True:
        found = store.newest(against)
        manifest = found.manifest
        if manifest is None:
            return Restored(step=0, checkpoint="version 0", passed_over=found.passed_over)
        try:
            training.restore(store, manifest)
        except (WeightError, ValueError) as err:
            unfit[manifest.name] = str(err)
            continue
        return Restored(
            step=manifest.step,
            checkpoint=f"checkpoint {manifest.name} of step {manifest.step}",
            passed_over=found.passed_over,
        )
