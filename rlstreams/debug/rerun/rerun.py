"""Re-executes one recorded step, unchanged and optionally with changed settings; writes nothing.

Everything is compared with `StepCompleted`. A changed re-run starts from the same state and trains
on the same records: its result holds for this one gradient only, because the samples of later steps
came from the original policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlstreams.debug.rerun.findings import Finding, compare, differing
from rlstreams.debug.rerun.rebuilt import RerunError, rebuilt
from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.log.bus import Bus
from rlstreams.workers.config.layers import leaves
from rlstreams.workers.config.load import from_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.trainer.intake.payloads import Payload
from rlstreams.workers.trainer.intake.validation import check_reference
from rlstreams.workers.trainer.training.training import Trained, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a changed setting made of the step."""

    settings: tuple[str, ...]  # `trainer.loss.clip_high = 0.3 (was 0.28)`
    metrics: dict[str, float]
    loss: float
    weight_hash: str
    update_norm: float  # L2 of the change of all weights
    cosine: float  # between the two updates


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
    """Do step `step` of a run, or of a recording behind the same port, again.

    Args:
        config: where the model folder is now; everything else comes from the step's claim.
        checkpoints: folders of checkpoints to choose from.
        weights: folders of weight versions, to say which parameter differs.
        change: makes of the step's configuration that of a second re-run from the same state.

    Raises:
        RerunError: no such step, another model folder, an earlier step that is not equal, or
            records that it needs are gone.
        RetentionError, OffsetGoneError: retention removed records that it needs.
    """
    with rebuilt(bus, config, step, step, checkpoints=checkpoints) as before:
        training = before.training
        recorded = from_json(before.ledger.claims[before.ledger.steps[step].epoch].config)
        changed = None if change is None else change(recorded)
        before.go_to(step - 1)
        state = State(training, step - 1)
        found = before.again(step)
        event, again, payloads = found.recorded, found.again, found.payloads
        made = _weights(training)
        findings = compare(found, recorded, differing(event, made, weights))
        experiment = None
        if changed is not None:
            _check_changed(changed, payloads)
            state.back()
            other = before.again(step, changed.trainer).again
            experiment = _change(recorded, changed, other, state.weights, made, _weights(training))
        return Rerun(
            step=step,
            started_from=before.started_from,
            num_redone=before.num_redone,
            findings=tuple(findings),
            recorded=event,
            again=again,
            update_norm=float(_update(state.weights, made).norm()),
            environment=before.environment(step),
            change=experiment,
        )


def _check_changed(changed: RunConfig, payloads: Sequence[Payload]) -> None:
    """Whether the records have what the changed step needs.

    Raises:
        RerunError: names it.
    """
    try:
        for payload in payloads:
            check_reference(payload.scored, changed.trainer.loss)
    except ValueError as err:
        name = changed.trainer.loss.why_compared.partition(" ")[0]
        raise RerunError(f"--set {name}: {err}") from err


class State:
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


def _change(
    recorded: RunConfig,
    changed: RunConfig,
    trained: Trained,
    before: Mapping[str, Tensor],
    as_it_was: Mapping[str, Tensor],
    now: Mapping[str, Tensor],
) -> Change:
    one, other = _update(before, as_it_was), _update(before, now)
    return Change(
        settings=tuple(_changed_settings(recorded, changed)),
        metrics=trained.metrics,
        loss=trained.loss,
        weight_hash=trained.weight_hash,
        update_norm=float(other.norm()),
        cosine=float(torch.nn.functional.cosine_similarity(one, other, dim=0)),
    )


def _update(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([(after[n].double() - t.double()).flatten() for n, t in before.items()])


def _changed_settings(recorded: RunConfig, changed: RunConfig) -> list[str]:
    import msgspec

    old, new = (
        dict(leaves(msgspec.to_builtins(c.trainer), "trainer.")) for c in (recorded, changed)
    )
    return [f"{name} = {new[name]} (was {old[name]})" for name in old if old[name] != new[name]]
