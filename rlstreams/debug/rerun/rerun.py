"""Re-executes one recorded step, unchanged and optionally with changed settings; writes nothing.

The nearest confirmed checkpoint before the step is loaded, the steps in between are redone as a
restarted trainer would, and then the step itself. Everything is compared with `StepCompleted`. A
changed re-run starts from the same state and trains on the same records: its result holds for this
one gradient only, because the samples of later steps came from the original policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlstreams.debug.rerun.findings import Finding, compare, differing
from rlstreams.schemas.events import StepCompleted, TrainerStarted
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import SCORED
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.load import from_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.device import nearest_devices
from rlstreams.workers.trainer.claim import read_ledger
from rlstreams.workers.trainer.facts import versions
from rlstreams.workers.trainer.intake.fetch import RecordGoneError
from rlstreams.workers.trainer.intake.payloads import Payload
from rlstreams.workers.trainer.intake.validation import check_reference
from rlstreams.workers.trainer.learn.cut import Cut, recorded_cut
from rlstreams.workers.trainer.parallel.team import team_of
from rlstreams.workers.trainer.redo.ledger import Ledger, StepFact
from rlstreams.workers.trainer.redo.redo import differences, read_step, redo_step
from rlstreams.workers.trainer.redo.restore import objection
from rlstreams.workers.trainer.redo.retention import check_redo
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest
from rlstreams.workers.trainer.training.training import Trained, Training
from rlstreams.workers.weights.channel import WeightError


class RerunError(ConfigError):
    """A step that cannot be re-run; says what is there instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a changed setting made of the step."""

    settings: tuple[str, ...]  # `trainer.loss.clip_high = 0.3 (was 0.28)`
    metrics: dict[str, float]
    loss: float
    weight_hash: str
    update_norm: float  # L2 of the change of all weights
    cosine: float  # between the two updates
    by_parameter: dict[str, tuple[float, float]]  # L2 of the update: as it was, changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What became of one step."""

    step: int
    started_from: str  # a checkpoint, or the model folder
    num_redone: int  # steps between it and this one
    findings: tuple[Finding, ...]
    recorded: StepCompleted
    again: Trained
    update_norm: float
    environment: str  # what differs from the recorded versions; "": nothing
    change: Change | None

    @property
    def is_equal(self) -> bool:
        """Whether every finding is equal."""
        return all(finding.is_equal for finding in self.findings)


def rerun(
    bus: Bus,
    config: RunConfig,
    step: int,
    *,
    checkpoints: Sequence[Path],
    weights: Sequence[Path] = (),
    change: Callable[[RunConfig], RunConfig] | None = None,
) -> Rerun:
    """Do step `step` again.

    Args:
        bus: of the run, or a recording behind the same port; nothing is written.
        config: where the model folder is now; everything else comes from the step's claim.
        step: which.
        checkpoints: folders of checkpoints to choose from.
        weights: folders of weight versions, to say which parameter differs.
        change: makes of the step's configuration that of a second re-run from the same state.

    Raises:
        RerunError: no such step, another model folder, an earlier step that is not equal, or
            records that it needs are gone.
        RetentionError, OffsetGoneError: retention removed records that it needs.
    """
    ledger = read_ledger(bus, "rerun")
    if step not in ledger.steps:
        raise RerunError(f"step {step} was never completed: the log holds {_held(ledger)}")
    recorded = from_json(ledger.claims[ledger.steps[step].epoch].config)
    with contextlib.closing(_training(config, recorded)) as training:
        ready = _ready(bus, config, ledger, recorded, training, step, checkpoints)
        return _rerun(bus, ready, weights, change)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """Everything is there, and the nearest checkpoint is loaded."""

    ledger: Ledger
    training: Training
    recorded: RunConfig  # of the claim that the step was done under
    facts: tuple[StepFact, ...]  # the steps since the checkpoint, the one that is asked for last
    started_from: str

    def environment(self, fact: StepFact) -> str:
        """What differs here from where a step was done; each claim tells its own."""
        claim = self.ledger.claims[fact.epoch]
        return differences(claim.versions, versions(self.training.numerics))


def _rerun(
    bus: Bus,
    ready: _Ready,
    weights: Sequence[Path],
    change: Callable[[RunConfig], RunConfig] | None,
) -> Rerun:
    training, recorded = ready.training, ready.recorded
    changed = None if change is None else change(recorded)
    _redo_before(bus, ready)
    event, payloads = _recorded(bus, ready.facts[-1])
    state = _State(training, event.step - 1)
    training.configure(recorded.trainer)
    again = _train(training, event, payloads, recorded_cut(event))
    made = _weights(training)
    findings = compare(event, again, payloads, recorded, differing(event, made, weights))
    experiment = None
    if changed is not None:
        _check_changed(changed, payloads)
        state.back()
        training.configure(changed.trainer)
        cut = None if _is_recut(recorded, changed) else recorded_cut(event)
        other = _train(training, event, payloads, cut)
        experiment = _change(recorded, changed, other, state.weights, made, _weights(training))
    return Rerun(
        step=event.step,
        started_from=ready.started_from,
        num_redone=len(ready.facts) - 1,
        findings=tuple(findings),
        recorded=event,
        again=again,
        update_norm=float(_update(state.weights, made).norm()),
        environment=ready.environment(ready.facts[-1]),
        change=experiment,
    )


def _training(config: RunConfig, recorded: RunConfig) -> Training:
    """The model of the model folder, as the step's claim says to train it."""
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


def _ready(
    bus: Bus,
    config: RunConfig,
    ledger: Ledger,
    recorded: RunConfig,
    training: Training,
    step: int,
    checkpoints: Sequence[Path],
) -> _Ready:
    claim = ledger.claims[ledger.steps[step].epoch]
    saved, started_from = _start(training, ledger, claim, config, step, checkpoints)
    missing = [number for number in range(saved + 1, step) if number not in ledger.steps]
    if missing:
        raise RerunError(
            f"from {started_from} to step {step}, step {missing[0]} is not there to be redone: the "
            f"log holds {_held(ledger)}; name a checkpoint of step {step - 1} with --checkpoints, "
            "or record the run from its begin"
        )
    facts = tuple(ledger.steps[number] for number in range(saved + 1, step + 1))
    check_redo(facts, bus.beginnings(SCORED.name), started_from)
    return _Ready(
        ledger=ledger,
        training=training,
        recorded=recorded,
        facts=facts,
        started_from=started_from,
    )


def _redo_before(bus: Bus, ready: _Ready) -> None:
    """The steps between the checkpoint and the one that is asked for."""
    for fact in ready.facts[:-1]:
        event, payloads = _recorded(bus, fact)
        redone = redo_step(ready.training, ready.ledger, fact, event, payloads)
        if redone.weight_hash != fact.weight_hash:
            raise RerunError(
                f"step {fact.step}, on the way from {ready.started_from}, gave weights "
                f"{redone.weight_hash[:12]}, the log says {fact.weight_hash[:12]}: "
                f"{ready.environment(fact) or 'nothing that its claim records differs'}"
            )


def _recorded(bus: Bus, fact: StepFact) -> tuple[StepCompleted, Sequence[Payload]]:
    """A step's event and its samples.

    Raises:
        RerunError: a sample is not there any more; names its position.
    """
    try:
        return read_step(bus, fact)
    except (RecordGoneError, TimeoutError) as err:
        raise RerunError(
            f"step {fact.step} cannot be read any more: {err}. Retention removed it, or files of "
            "the recording are missing; a recording made while the log held it has it"
        ) from err


def _held(ledger: Ledger) -> str:
    numbers = sorted(ledger.steps)
    return f"steps {numbers[0]} to {numbers[-1]}" if numbers else "no completed step"


def _start(
    training: Training,
    ledger: Ledger,
    claim: TrainerStarted,
    config: RunConfig,
    step: int,
    folders: Sequence[Path],
) -> tuple[int, str]:
    """Load the newest confirmed checkpoint before `step`; its step, and its name for people."""

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
        return manifest.step, f"checkpoint {manifest.name} of step {manifest.step}"
    expected = claim.hashes.get("model", training.model_hash)
    if training.model_hash != expected:
        raise RerunError(
            f"there is no checkpoint before step {step} in "
            f"{', '.join(map(str, folders)) or 'any folder'}, and the model folder "
            f"{config.model.path} holds weights {training.model_hash[:12]}, "
            f"the run began with {expected[:12]}"
        )
    return 0, f"the model folder {config.model.path}"


def _check_changed(changed: RunConfig, payloads: Sequence[Payload]) -> None:
    """Whether the records have what the changed step needs.

    Raises:
        RerunError: names it.
    """
    try:
        for payload in payloads if changed.trainer.loss.kl_coef else ():
            check_reference(payload.scored)
    except ValueError as err:
        raise RerunError(f"--set trainer.loss.kl_coef: {err}") from err


class _State:
    """Model and optimizer at one moment, to come back to."""

    def __init__(self, training: Training, step: int) -> None:
        self._training = training
        self._step = step
        self.weights = _weights(training)
        self._hash = training.weight_hash
        tensors = training.learner.optimizer_tensors()
        self._optimizer = _copied(tensors)

    def back(self) -> None:
        """Return to it."""
        self._training.learner.load(self.weights, self._optimizer, self._step)
        self._training.weight_hash = self._hash


def _weights(training: Training) -> dict[str, Tensor]:
    return _copied(training.learner.weights())


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the host: a GPU that is one of several would not have room for all of them."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _train(
    training: Training,
    event: StepCompleted,
    payloads: Sequence[Payload],
    cut: Cut | None,
) -> Trained:
    """The step; None: cut anew."""
    return training.train(payloads, event.masked, event.policy_version - 1, cut)


def _is_recut(recorded: RunConfig, changed: RunConfig) -> bool:
    return recorded.trainer.micro_batch_tokens != changed.trainer.micro_batch_tokens


def _change(
    recorded: RunConfig,
    changed: RunConfig,
    trained: Trained,
    before: Mapping[str, Tensor],
    as_it_was: Mapping[str, Tensor],
    now: Mapping[str, Tensor],
) -> Change:
    by_parameter = {
        name: (
            float((as_it_was[name].float() - tensor.float()).norm()),
            float((now[name].float() - tensor.float()).norm()),
        )
        for name, tensor in before.items()
    }
    one, other = _update(before, as_it_was), _update(before, now)
    return Change(
        settings=tuple(_changed_settings(recorded, changed)),
        metrics=trained.metrics,
        loss=trained.loss,
        weight_hash=trained.weight_hash,
        update_norm=float(other.norm()),
        cosine=float(torch.nn.functional.cosine_similarity(one, other, dim=0)),
        by_parameter=by_parameter,
    )


def _update(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([(after[n].double() - t.double()).flatten() for n, t in before.items()])


def _changed_settings(recorded: RunConfig, changed: RunConfig) -> list[str]:
    import msgspec

    old, new = (_flat(msgspec.to_builtins(c.trainer), "trainer") for c in (recorded, changed))
    return [f"{name} = {new[name]} (was {old[name]})" for name in old if old[name] != new[name]]


def _flat(tree: Mapping[str, object], prefix: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}"
        if isinstance(value, dict):
            found |= _flat(value, name)
        else:
            found[name] = value
    return found
