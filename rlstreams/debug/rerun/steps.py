"""The steps of a run done again, one after another, from its log or a recording of it alone.

    for step in steps_again(bus, config):
        print(step.number, step.is_equal)

Claims nothing and writes nothing into the log. Under the recorded versions of hardware and
libraries each hash is the ledger's, however often the trainer was killed on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlstreams.debug.rerun.findings import Finding, compare
from rlstreams.debug.rerun.rebuilt import RerunError, rebuilt
from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.log.bus import Bus
from rlstreams.workers.config.load import from_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.trainer.training.training import Trained
from rlstreams.workers.weights.file import FileWeightServer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAgain:
    """One step, as it was recorded and as it came out now."""

    recorded: StepCompleted
    again: Trained
    is_equal: bool  # the weights are those that the run went on with
    differences: tuple[Finding, ...]

    @property
    def number(self) -> int:
        """Of the step."""
        return self.recorded.step


def steps_again(
    bus: Bus,
    config: RunConfig,
    *,
    first: int = 1,
    last: int = 0,
    checkpoints: Sequence[Path] = (),
    keep_weights: Path | None = None,
) -> Iterator[StepAgain]:
    """Each committed step from `first` to `last` (0: the newest), in order.

    Args:
        checkpoints: see `rebuilt`; step 1 begins with the model folder in any case.
        keep_weights: a folder for every version that is made, the one before `first` included.

    Raises:
        RerunError: as `rebuilt`; or a redo drifted on the way, and no redo elsewhere makes the
            weights that the run went on with.
        RetentionError, OffsetGoneError: retention removed records that it needs.
    """
    with rebuilt(bus, config, first, last, checkpoints=checkpoints) as before:
        ledger, training = before.ledger, before.training
        last = last or ledger.last_step
        if first <= ledger.drifted_step < last:
            raise RerunError(
                f"at step {ledger.drifted_step} the run went on with other weights than its log "
                f"makes (RedoDrifted): steps can be done again up to it, or from a checkpoint "
                "behind it"
            )
        before.go_to(first - 1)
        server = FileWeightServer(keep_weights, keep=last - first + 2) if keep_weights else None
        if server:
            version = ledger.steps[first].policy_version - 1
            server.publish(version, training.learner.weights(), training.weight_hash)
        for number in range(first, last + 1):
            step = before.again(number)
            recorded = from_json(ledger.claims[step.fact.epoch].config)
            if server:
                version = step.recorded.policy_version
                server.publish(version, training.learner.weights(), training.weight_hash)
            yield StepAgain(
                recorded=step.recorded,
                again=step.again,
                is_equal=step.is_equal,
                differences=tuple(one for one in compare(step, recorded) if not one.is_equal),
            )
