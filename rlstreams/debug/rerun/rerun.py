"""Re-executes one recorded step, unchanged and optionally with changed settings; writes nothing.

Everything is compared with `StepCompleted`. A changed re-run starts from the same state and trains
on the same records: its result holds for this one gradient only, because the samples of later steps
came from the original policy. `lines` is for the terminal, `profile` a trace of the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlstreams.debug.rerun.findings import Finding, compare, differing
from rlstreams.debug.rerun.rebuilt import RerunError, rebuilt
from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import counted
from rlstreams.streams.views.pace import MEASURED
from rlstreams.workers.config.layers import override_layer, tree_layer
from rlstreams.workers.config.load import merged, resolved_json, tree_to_change
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.user_code import source_texts
from rlstreams.workers.loop.agreement import code_digests, own_code
from rlstreams.workers.loop.claims import claimed_config
from rlstreams.workers.trainer.family import differing as differing_fields
from rlstreams.workers.trainer.intake.payloads import Payload
from rlstreams.workers.trainer.intake.validation import check_reference
from rlstreams.workers.trainer.training.training import Trained, Training

_HEAVIEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The profile of one step; of several ranks, rank 0's."""

    is_equal: bool  # the profiled step made the recorded weights
    seconds: float  # of the step, the profiler's own work included
    heaviest: tuple[tuple[str, int, float], ...]  # kernel, calls, seconds

    def lines(self, step: int, out: Path) -> list[str]:
        """Return lines for the terminal."""
        same = "the recorded weights" if self.is_equal else "OTHER weights than the recorded ones"
        return [
            f"{'seconds':>9} {'calls':>7}  the kernels of step {step} that take longest",
            *(f"{own_s:>9.4f} {calls:>7}  {name[:100]}" for name, calls, own_s in self.heaviest),
            f"the step took {self.seconds:.3f} s under the profiler and made {same}; trace: {out}",
        ]


def profile(
    bus: Bus, config: RunConfig, step: int, *, checkpoints: Sequence[Path], out: Path
) -> Profile:
    """Do the step twice, the second time under `torch.profiler`: no compiling is in the trace.

    Args:
        out: file for the trace, in Chrome's JSON.

    Raises:
        RerunError, RetentionError, OffsetGoneError: as `rerun`.
        OSError: `out` cannot be written.
    """
    with rebuilt(bus, config, step, step, checkpoints=checkpoints) as before:
        before.go_to(step - 1)
        state = SavedState(before.training, step - 1)
        before.again(step)
        state.back()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as found:
            again = before.again(step)
    found.export_chrome_trace(str(out))

    def own_us(row: torch.autograd.profiler_util.FunctionEventAvg) -> float:
        return float(row.self_device_time_total or row.self_cpu_time_total)

    on_gpu = [row for row in found.key_averages() if row.self_device_time_total]
    rows = sorted(on_gpu or found.key_averages(), key=own_us, reverse=True)[:_HEAVIEST]
    return Profile(
        is_equal=again.is_equal,
        seconds=again.again.seconds,
        heaviest=tuple((row.key, row.count, own_us(row) / 1e6) for row in rows),
    )


# Settings of a step's computation with its samples chosen. All others took effect before.
CHANGEABLE = ("trainer.loss.", "trainer.optimizer.")
ALSO = (
    "trainer.micro_batch_tokens",
    "trainer.shared_prefixes",
    "trainer.minibatches",
    "trainer.batch_epochs",
    "trainer.control",
)


def set_pairs(settings: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each `--set`.

    Raises:
        ConfigError: one has no value.
    """
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set takes NAME=VALUE, got {setting!r}")
        yield name, text


def changed_config(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Return `config` with settings such as `["trainer.loss.clip_high=0.3"]`.

    Raises:
        ConfigError: an unknown or impossible setting, or one that changes nothing in a step whose
            samples are chosen already.
    """
    set_here = list(set_pairs(settings))
    tree = tree_to_change(config, [name for name, _ in set_here])
    layers = [tree_layer(tree, "recorded configuration")]
    for name, text in set_here:
        if not name.startswith(CHANGEABLE) and name not in ALSO:
            raise ConfigError(
                f"--set {name}: the samples of a recorded step are chosen already, so only "
                f"{', '.join(f'{n}*' for n in CHANGEABLE)}, {', '.join(ALSO)} can change it"
            )
        layers.append(override_layer(name, text))
    return merged(layers, is_start=False).config


def changed_code(
    changed: RunConfig, settings: Sequence[str], code: Mapping[str, str]
) -> dict[str, str]:
    """Source of the user's functions that train, under `settings`: of one that these name it is
    taken from its files as they are, of others from the step's claim.

    Raises:
        ConfigError: there is no such file.
    """
    set_here = {name for name, _ in set_pairs(settings)}
    found = dict(code)
    for field, name, _ in changed.trainer.own():
        if field in set_here:
            start = f"{field}: "
            found = {key: text for key, text in found.items() if not key.startswith(start)}
            found |= source_texts(field, name)
    return found


LABEL = "offline experiment on recorded data: true for the gradient of this step alone"


def lines(found: Rerun) -> list[str]:
    """Return lines for the terminal."""
    redone = counted(found.num_redone, "step")
    between = f", {redone} redone on the way" if found.num_redone else ""
    head = [
        f"step {found.step}, from {found.started_from}{between}",
        f"{counted(len(found.recorded.samples), 'sample')} in "
        f"{counted(len(found.recorded.micro_batches), 'micro-batch', 'micro-batches')}, "
        f"from version {found.recorded.policy_version - 1} to {found.recorded.policy_version}",
        *found.code,
        "",
        f"{'':<15} {'recorded':<22} {'again':<22}",
    ]
    body = [line for finding in found.findings for line in _finding(finding)]
    verdict = (
        "every one is equal, bit for bit"
        if found.is_equal
        else "NOT equal; " + (f"since it was recorded {found.environment}" if found.environment else
                              "of what the claim records, nothing differs")
    )  # fmt: skip
    tail = ["", verdict]
    return [*head, *body, *tail, *(_change_lines(found, found.change) if found.change else [])]


def _finding(finding: Finding) -> list[str]:
    verdict = "equal" if finding.is_equal else "DIFFERS"
    line = (
        f"{finding.name:<15} {_short(finding.recorded):<22} {_short(finding.again):<22} {verdict}"
    )
    if finding.is_equal or not finding.place:
        return [line]
    return [line, f"{'':<15} first: {finding.place}"]


def _change_lines(found: Rerun, change: Change) -> list[str]:
    rows = [("loss", found.again.loss, change.loss)]
    rows += [
        (name, value, change.metrics.get(name, float("nan")))
        for name, value in found.again.metrics.items()
        if name not in MEASURED
    ]
    rows.append(("norm of the update", found.update_norm, change.update_norm))
    return [
        "",
        f"CHANGED: {'; '.join(change.settings) or 'nothing'}",
        LABEL,
        f"{'':<20} {'as it was':>14} {'changed':>14} {'difference':>14}",
        *(
            f"{name:<20} {was:>14.6g} {now:>14.6g} {now - was:>+14.3g}"
            + ("" if was == now else "  *")
            for name, was, now in rows
        ),
        f"weights {found.again.weight_hash[:12]} as it was, {change.weight_hash[:12]} changed; "
        f"cosine between the two updates {change.cosine:.6f}",
        *(
            ["the same weights, bit for bit: in this step the change makes no difference"]
            if found.again.weight_hash == change.weight_hash
            else []
        ),
    ]


def _short(text: str) -> str:
    if len(text) == 64 and not text.startswith("("):
        return text[:12]
    return text if len(text) <= 22 else f"{text[:19]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Results of the step under changed settings."""

    settings: tuple[str, ...]  # `trainer.loss.clip_high = 0.3 (was 0.28)`
    metrics: dict[str, float]
    loss: float
    weight_hash: str
    update_norm: float  # L2 of the change of all weights
    cosine: float  # between the two updates


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Results of one step done again."""

    step: int
    started_from: str  # a checkpoint, or the model folder
    num_redone: int  # steps done again before this one
    findings: tuple[Finding, ...]
    recorded: StepCompleted
    again: Trained
    update_norm: float
    environment: str  # differences from the recorded versions; "": none
    code: tuple[str, ...]  # lines on the user's recorded code that the step was done with
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
    settings: Sequence[str] | None = None,
) -> Rerun:
    """Do step `step` of a run, or of a recording behind the same port, again.

    Args:
        config: names the present place of the model folder; all else comes from the step's claim.
        checkpoints: folders of checkpoints to choose from.
        weights: folders of weight versions, to name the parameter that differs.
        settings: of a second re-run, see `changed_config`; None: there is none.

    Raises:
        RerunError: no such step, another model folder, an earlier step that is not equal, or
            records that it needs are gone.
        RetentionError, OffsetGoneError: retention removed records that it needs.
    """
    with rebuilt(bus, config, step, step, checkpoints=checkpoints) as before:
        training = before.training
        claim = before.ledger.claims[before.ledger.steps[step].epoch]
        recorded = claimed_config(claim)
        changed = None if settings is None else changed_config(recorded, settings)
        code = changed_code(changed, settings or (), claim.code) if changed else {}
        before.go_to(step - 1)
        state = SavedState(training, step - 1)
        found = before.again(step)
        event, again, payloads = found.recorded, found.again, found.payloads
        made = _weights(training)
        findings = compare(found, recorded, differing(event, made, weights))
        experiment = None
        if changed is not None:
            _check_changed(changed, payloads)
            state.back()
            other = before.again(step, changed.trainer, code).again
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
            code=tuple(_code_lines(recorded, claim.code)),
            change=experiment,
        )


def _code_lines(config: RunConfig, code: Mapping[str, str]) -> Iterator[str]:
    """Lines on the user's functions of a claim, and whether this host has others now."""
    try:
        now = own_code(config) if code else {}
    except ConfigError:
        now = {}
    for name, digest in code_digests(code).items():
        here = "as it is here" if now.get(name) == code[name] else "NOT as it is here"
        yield f"{name} as the log has it, SHA-256 {digest[:12]}, {here}"


def _check_changed(changed: RunConfig, payloads: Sequence[Payload]) -> None:
    """Check that the records hold what the changed step needs. Raises RerunError."""
    try:
        for payload in payloads:
            check_reference(payload.scored, changed.trainer.loss)
    except ValueError as err:
        name = changed.trainer.loss.why_compared.partition(" ")[0]
        raise RerunError(f"--set {name}: {err}") from err


class SavedState:
    """A copy of model and optimizer, to return to."""

    def __init__(self, training: Training, step: int) -> None:
        self._training = training
        self._step = step
        self.weights = _weights(training)
        self._hash = training.weight_hash
        tensors = training.learner.optimizer_tensors()
        self._optimizer = _copied(tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(t.nbytes for own in (self.weights, self._optimizer) for t in own.values())

    def back(self) -> None:
        """Load this state into the training."""
        self._training.learner.load(self.weights, self._optimizer, self._step)
        self._training.weight_hash = self._hash


def _weights(training: Training) -> dict[str, Tensor]:
    return _copied(training.learner.weights())


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the host: one GPU of several has no room for all of them."""
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
    found = differing_fields(resolved_json(recorded), resolved_json(changed))
    return [f"{name} = {is_} (was {was})" for name, was, is_ in found]
