"""A trainer's weights as they were before a step, rebuilt from the log; writes nothing into it.

The nearest confirmed checkpoint is loaded, or the model folder, and the steps in between are redone
as a restarted trainer would. Every tool that does steps again begins here; `steps_again` yields
them one by one. Under the recorded versions of hardware and libraries each hash is the ledger's.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from rlstreams.debug.rerun.findings import Finding, compare
from rlstreams.schemas.events import StepCompleted, TrainerStarted
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import SCORED
from rlstreams.workers.compute.team import team_of
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.loop.claims import claimed_config
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.device import nearest_devices
from rlstreams.workers.trainer.claim import read_ledger
from rlstreams.workers.trainer.facts import versions
from rlstreams.workers.trainer.family import of_parent
from rlstreams.workers.trainer.intake.fetch import RecordGoneError
from rlstreams.workers.trainer.intake.payloads import Payload
from rlstreams.workers.trainer.redo.redo import (
    RedoneStep,
    differences,
    read_step,
    redo_steps,
)
from rlstreams.workers.trainer.redo.retention import check_redo
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest, objection
from rlstreams.workers.trainer.training.resumable import run_now
from rlstreams.workers.trainer.training.training import Trained, Training
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.file import FileWeightServer


def steps_again(
    bus: Bus,
    config: RunConfig,
    *,
    first: int = 0,
    last: int = 0,
    checkpoints: Sequence[Path] = (),
    keep_weights: Path | None = None,
) -> Iterator[tuple[RedoneStep, list[Finding]]]:
    """Yield each committed step from `first` to `last`, in order, with its differences.

    Args:
        first, last: 0: the run's first, the newest.
        checkpoints: see `rebuilt`; a run's first step begins with its model folder, or with the
            checkpoint of a branch's base, in any case.
        keep_weights: a folder for every version that is made, the one before `first` included.

    Raises:
        RerunError: as `rebuilt`; or a redo of the run drifted on the way, and no other redo makes
            the weights that the run went on with.
        RetentionError, OffsetGoneError: retention removed records that it needs.
    """
    with rebuilt(bus, config, first, last, checkpoints=checkpoints) as before:
        ledger, training = before.ledger, before.training
        first, last = first or ledger.begins_behind + 1, last or ledger.last_step
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
            recorded = claimed_config(ledger.claims[step.fact.epoch])
            if server:
                version = step.recorded.policy_version
                server.publish(version, training.learner.weights(), training.weight_hash)
            yield step, [one for one in compare(step, recorded) if not one.is_equal]
            del step  # its records, before the next ones are read


class RerunError(ConfigError):
    """A step that cannot be re-run; the message names the steps that can."""


class UnequalError(RerunError):
    """A step gave other weights than recorded."""

    def __init__(self, message: str, environment: str) -> None:
        super().__init__(f"{message}: {environment or 'nothing that its claim records differs'}")
        self.environment = environment  # differences from the recorded one; "": none


class Rebuilt:
    """Model and optimizer at a step; `again` makes the next one."""

    def __init__(self, bus: Bus, ledger: Ledger, training: Training) -> None:
        self._bus = bus
        self.ledger = ledger
        self.training = training
        self.started_from = ""  # a checkpoint, or the model folder
        self.num_redone = 0  # steps done again since `started_from`

    def again(
        self,
        step: int,
        change: TrainerSection | None = None,
        code: Mapping[str, str] | None = None,
    ) -> RedoneStep:
        """Do a step again, from the weights in hand; see `redo_steps`.

        Raises RerunError: a record is gone; names its position.
        """
        found: list[RedoneStep] = []
        redo = redo_steps(
            self._bus, self.ledger, self.training, step, step,
            change=change, code=code, on_step=found.append,
        )  # fmt: skip
        with _readable(step):
            run_now(redo)
        return found[0]

    def read(self, step: int) -> tuple[StepCompleted, list[Payload]]:
        """Return a step's event, and its samples in batch order. Raises as `again`."""
        return self.recorded(self._bus, self.ledger, step)

    @staticmethod
    def recorded(bus: Bus, ledger: Ledger, step: int) -> tuple[StepCompleted, list[Payload]]:
        """Read a step as `read` does, without rebuilt weights."""
        with _readable(step):
            return read_step(bus, ledger.steps[step], lambda _: None)

    def section(self, step: int) -> TrainerSection:
        """Return the trainer's section that the step was trained under."""
        return claimed_config(self.ledger.claims[self.ledger.steps[step].epoch]).trainer

    def environment(self, step: int) -> str:
        """Return the differences of this environment from that of the step's claim; "": none."""
        claim = self.ledger.claims[self.ledger.steps[step].epoch]
        return differences(claim.versions, versions(self.training.numerics))

    def go_to(self, step: int) -> Trained | None:
        """Redo the steps that the weights in hand lack, up to `step`; return the last one's result.

        Raises UnequalError: a step gave other weights than recorded; RerunError as `again`.
        """
        trained: Trained | None = None
        for number in range(self.training.learner.step_number + 1, step + 1):
            if self.ledger.is_disowned(number):  # no trainer made it, and a redo passes over it
                self.training.pass_over()
                continue
            redone = self.again(number)
            if (unequal := redone.unequal) is not None:
                what, expected, actual = unequal.part
                raise UnequalError(
                    f"step {number}, on the way from {self.started_from}, gave {what} "
                    f"{actual[:12]}, the log says {expected[:12]}",
                    self.environment(number),
                )
            self.num_redone += 1
            trained = redone.again
        return trained


@contextmanager
def _readable(step: int) -> Iterator[None]:
    """Turn errors of reading a step into RerunError: the step's records are gone."""
    try:
        yield
    except (RecordGoneError, TimeoutError) as err:
        raise RerunError(
            f"step {step} cannot be read any more: {err}. Retention removed it, or files of "
            "the recording are missing; a recording made while the log held it has it"
        ) from err


@contextmanager
def rebuilt(
    bus: Bus, config: RunConfig, first: int, last: int, *, checkpoints: Sequence[Path]
) -> Iterator[Rebuilt]:
    """Open the weights of a checkpoint before step `first`; check the records of steps to `last`.

    Args:
        config: names the present place of the model folder; all else comes from the step's claim.
        first: 0: the run's first.
        last: 0: the newest.
        checkpoints: folders of checkpoints to choose from.

    Raises:
        RerunError: no such steps, another model folder, or records that it needs are gone.
        RetentionError, OffsetGoneError: retention removed records that it needs.
    """
    ledger = read_ledger(bus, "rerun")
    first, last = first or ledger.begins_behind + 1, last or ledger.last_step
    for step in (first, max(first, last)):
        check_step(ledger, step)
    claim = ledger.claims[ledger.steps[first].epoch]
    with _before(bus, ledger, claim, config, first, last, checkpoints) as found:
        yield found


@contextmanager
def reached(
    bus: Bus, ledger: Ledger, config: RunConfig, step: int, checkpoints: Sequence[Path]
) -> Iterator[Rebuilt]:
    """Open weights and optimizer as `step` left them, with the hash that the ledger has.

    Args and raises as `rebuilt`. A checkpoint of the step itself will do.
    """
    check_step(ledger, step)
    claim = ledger.claims[ledger.steps[step].epoch]
    with _before(bus, ledger, claim, config, step + 1, step, checkpoints) as found:
        found.go_to(step)
        yield found


def check_step(ledger: Ledger, step: int) -> None:
    """
    Raises:
        RerunError: no step of this run; names the parent that made it, or the existing steps.
    """
    branch = ledger.branch
    if branch is not None and step <= branch.step:
        again = f"rlstreams replay step {step} {shlex.quote(branch.parent_place)}"
        raise RerunError(f"{of_parent(branch, step)}: {again}")
    if step not in ledger.steps:
        raise RerunError(f"step {step} was never completed: the log holds {_held(ledger)}")


@contextmanager
def _before(
    bus: Bus,
    ledger: Ledger,
    claim: TrainerStarted,
    config: RunConfig,
    first: int,
    last: int,
    checkpoints: Sequence[Path],
) -> Iterator[Rebuilt]:
    with closing(_training(config, claimed_config(claim))) as training:
        found = Rebuilt(bus, ledger, training)
        found.started_from = _start(training, ledger, claim, config, first, checkpoints)
        needed = range(training.learner.step_number + 1, last + 1)
        missing = [number for number in needed if number not in ledger.steps]
        if missing:
            raise RerunError(
                f"from {found.started_from} to step {last}, step {missing[0]} is not there to be "
                f"redone: the log holds {_held(ledger)}; name a checkpoint of step {first - 1} "
                "with --checkpoints, or record the run from its begin"
            )
        facts = [ledger.steps[number] for number in needed]
        check_redo(facts, bus.beginnings(SCORED.name), found.started_from)
        yield found


def _training(config: RunConfig, recorded: RunConfig) -> Training:
    """Load the model folder's model, to be trained as the step's claim says."""
    try:
        section = recorded.trainer
        device, gpus = nearest_devices("trainer.device", section.device, section.ranks)
        return Training(
            model_folder(config.model.path),
            section,
            recorded.model.threads,
            device,
            recorded.model.dtype,
            team=team_of(gpus),
        )
    except (EngineError, OSError) as err:
        raise RerunError(
            f"the model folder {config.model.path} cannot be used: {err}; name it with --model"
        ) from err


def _held(ledger: Ledger) -> str:
    if ledger.steps:
        return f"steps {min(ledger.steps)} to {ledger.last_step}"
    return "no completed step" + (f" ({ledger.newest_void})" if ledger.newest_void else "")


def _start(
    training: Training,
    ledger: Ledger,
    claim: TrainerStarted,
    config: RunConfig,
    step: int,
    folders: Sequence[Path],
) -> str:
    """Load the newest confirmed checkpoint before `step`; return its name for people."""

    def against(manifest: Manifest) -> str:
        if manifest.step >= step:
            return f"it is of step {manifest.step}, not before {step}"
        return objection(claim.run, ledger, manifest)

    stores = [CheckpointStore(folder) for folder in folders]
    found = [(store, store.newest(against).manifest) for store in stores]
    usable = [(m.step, store, m) for store, m in found if m is not None]
    if usable:
        _, store, manifest = max(usable, key=lambda item: item[0])
        try:
            training.restore(store, manifest)
        except (WeightError, ValueError) as err:
            raise RerunError(f"checkpoint {manifest.name} is not this model's: {err}") from err
        return f"checkpoint {manifest.name} of step {manifest.step}"
    if (branch := ledger.branch) is not None:
        raise RerunError(
            f"there is no checkpoint before step {step} in "
            f"{', '.join(map(str, folders)) or 'any folder'}, not even of step {branch.step}, with "
            f"which this branch of {branch.parent!r} began: name its folder with --checkpoints"
        )
    expected = claim.hashes.get("model", training.model_hash)
    if training.model_hash != expected:
        raise RerunError(
            f"there is no checkpoint before step {step} in "
            f"{', '.join(map(str, folders)) or 'any folder'}, and the model folder "
            f"{config.model.path} holds weights {training.model_hash[:12]}, "
            f"the run began with {expected[:12]}"
        )
    return f"the model folder {config.model.path}"
