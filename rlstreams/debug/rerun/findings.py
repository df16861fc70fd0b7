"""A re-run step compared with its record: equal facts, and the first place of each difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlstreams.schemas.events import TRAIN, StepCompleted
from rlstreams.streams.ledger import NOWHERE
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.log.text import counted
from rlstreams.streams.rows import scored_rows
from rlstreams.streams.segments import num_tokens
from rlstreams.streams.views.pace import MEASURED
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.model.cut import Cut
from rlstreams.workers.trainer.intake.admission import Admission, Plan
from rlstreams.workers.trainer.intake.groups import DeadSample, SeenSample
from rlstreams.workers.trainer.intake.payloads import Payload
from rlstreams.workers.trainer.learn.cutting import planned_cut, prefixes_of
from rlstreams.workers.trainer.redo.redo import RedoneStep
from rlstreams.workers.trainer.training.training import Trained
from rlstreams.workers.weights.file import file_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One compared fact of a step."""

    name: str
    recorded: str
    again: str
    place: str = ""  # the first place where it differs, as far as the log has it

    @property
    def is_equal(self) -> bool:
        """Whether recorded and recomputed fact are the same."""
        return self.recorded == self.again


def compare(step: RedoneStep, config: RunConfig, parameter: str = "") -> list[Finding]:
    """Compare all facts that a step's event holds of its computation, in the order of computation.

    Args:
        config: the configuration that it was recorded under.
        parameter: the place where the new weights first differ, see `differing`.
    """
    event, again, payloads = step.recorded, step.again, step.payloads
    plan = _planned(event, payloads, config)
    planned = _cut_again(step, config.trainer).sizes
    order = [(s.group_id, s.sample, s.oldest_policy_version) for s in event.samples]
    plan_order = [(s.seen.group_id, s.seen.sample, s.oldest_policy_version) for s in plan.samples]
    # An older release recorded fewer figures: what it did not record is contradicted by nothing.
    metrics = {name: again.metrics[name] for name in event.metrics if name in again.metrics}
    staleness = again.batch.staleness if event.staleness else {}
    anchors = again.batch.anchors if event.anchors else {}
    figures = _figures(event.metrics, event.staleness, event.anchors)
    figures_now = _figures(metrics, staleness, anchors)
    is_cut = _is_cut_of(event, planned)
    heads = (event.value_head_hash, again.value_head_hash)
    rows: list[tuple[str, object, object, str]] = [
        ("weights before", event.previous_hash, again.previous_hash, ""),
        ("order", order, plan_order, ""),
        ("masks", event.masked, plan.masked, ""),
        ("batch bytes", event.batch_hash, again.batch_hash, _first_sample(event, again, payloads)),
        (
            "micro-batches",
            event.micro_batches,
            event.micro_batches if is_cut else planned,
            _first_border(event.micro_batches, planned),
        ),
        ("loss", event.loss, again.loss, ""),
        ("gradient norm", event.metrics.get("grad_norm", math.nan), again.metrics["grad_norm"], ""),
        ("other figures", figures, figures_now, _first_figure(event.metrics, metrics)),
        *([("value head", *heads, "")] if any(heads) else []),
        ("weights after", event.weight_hash, again.weight_hash, parameter),
    ]
    return [
        Finding(name=name, recorded=str(recorded), again=str(now), place=place)
        for name, recorded, now, place in rows
    ]


def _cut_again(step: RedoneStep, by: TrainerSection) -> Cut:
    """Plan the step's micro-batches again, with its kinds of bins and shared tokens."""
    samples = [row for payload in step.payloads for row in scored_rows(payload.scored)]
    shares = any(part.taken is not None for part in step.again.batch.micro_batches)
    return planned_cut(
        [num_tokens(sample.trajectory) for sample in samples],
        [sample.trajectory.group_id for sample in samples],
        by.micro_batch_tokens,
        by.minibatches,
        in_bins=bool(step.recorded.bins),
        hands=by.hands,
        prefixes=prefixes_of(samples, replay_routes=by.routing_replay) if shares else None,
    )


def again_lines(step: RedoneStep, differences: Sequence[Finding]) -> list[str]:
    """Return lines on a step that was done again, for the terminal.

    Args:
        differences: findings that are not equal.
    """
    again, differ = step.again, counted(len(differences), "thing")
    rows = [
        f"{step.fact.step:>5}  {len(step.recorded.samples):>7}  {again.batch_hash[:12]:<14} "
        f"{again.loss!r:>22}  {again.weight_hash[:12]:<14} "
        f"{f'NOT equal in {differ}' if differences else 'equal'}"
    ]
    for one in differences:
        where = f"; first: {one.place}" if one.place else ""
        recorded, now = one.recorded[:60], one.again[:60]
        rows.append(f"       {one.name}: recorded {recorded}, now {now}{where}")
    return rows


def _planned(event: StepCompleted, payloads: Sequence[Payload], config: RunConfig) -> Plan:
    """Plan the step again from its samples and from the dead letters of its absent ones.

    The set of complete groups is taken from the step: it depended on a clock.
    """
    groups = {ref.group_id for ref in event.samples} | {one.group_id for one in event.absent}
    planner = Admission(
        replace(config.trainer, groups_per_step=len(groups)), group_size=config.prompts.group_size
    )
    for payload in payloads:
        raw = payload.raw
        planner.add(SeenSample.of(payload.scored, raw.position), 0.0)
    for one in event.absent:
        dead = DeadSample(
            group_id=one.group_id, sample=one.sample, purpose=TRAIN, row=-1, dataset_epoch=0,
            replacement=0, reason=one.reason, permanent=False, position=NOWHERE, origin=NOWHERE,
        )  # fmt: skip
        planner.dead(dead, 0.0)
    version = event.policy_version - 1
    nothing = Plan(policy_version=version, group_ids=(), samples=(), masked=(), absent=())
    return planner.plan(version) or nothing


def _figures(*figures: Mapping[str, float]) -> list[tuple[str, float]]:
    return [pair for one in figures for pair in sorted(one.items()) if pair[0] not in MEASURED]


def _first_figure(recorded: Mapping[str, float], now: Mapping[str, float]) -> str:
    for name in sorted((recorded.keys() | now.keys()) - MEASURED):
        if recorded.get(name) != now.get(name):
            return f"{name} was {recorded.get(name)!r}, now {now.get(name)!r}"
    return "staleness or anchors of the trained tokens"


def _first_sample(event: StepCompleted, again: Trained, payloads: Sequence[Payload]) -> str:
    """Return the first sample that is not the one that the step names."""
    for number, (ref, payload, advantage) in enumerate(
        zip(event.samples, payloads, again.advantages, strict=True)
    ):
        said = payload.scored.trajectory
        now = (said.group_id, said.sample, said.reward, advantage)
        then = (ref.group_id, ref.sample, ref.reward, ref.advantage)
        if now != then:
            return f"sample {number}, {sample_name(ref)} at {payload.raw.position}"
    return "in fields that the step does not name (log-probs, tokens)"


def _is_cut_of(event: StepCompleted, planned: Sequence[int]) -> bool:
    """Whether the step's micro-batches are the planned ones, or those cut where memory ran out."""
    return set(np.cumsum(planned).tolist()) <= set(np.cumsum(event.micro_batches).tolist())


def _first_border(recorded: Sequence[int], now: Sequence[int]) -> str:
    for number, (one, other) in enumerate(zip(recorded, now, strict=False)):
        if one != other:
            return f"micro-batch {number} held {one} samples, now {other}"
    return f"{len(recorded)} micro-batches, now {len(now)}"


def differing(event: StepCompleted, made: Mapping[str, Tensor], folders: Sequence[Path]) -> str:
    """Return the first parameter that differs from the recorded weights, if these are at hand."""
    from safetensors.torch import load_file

    name = file_name(event.policy_version, event.weight_hash)
    paths = [folder / name for folder in folders if (folder / name).is_file()]
    if not paths:
        return f"the weights of version {event.policy_version} are not at hand to say where"
    recorded = load_file(paths[0])
    for parameter, tensor in made.items():
        other = recorded.get(parameter)
        if other is None or other.shape != tensor.shape:
            return f"parameter {parameter} has another shape"
        if not torch.equal(other, tensor):
            unequal = other != tensor
            first = tuple(int(i) for i in unequal.nonzero()[0])
            worst = float((other.float() - tensor.float()).abs().max())
            return (
                f"parameter {parameter}, first at {list(first)}: {int(unequal.sum()):,} of "
                f"{tensor.numel():,} values, at most {worst:.3g} apart"
            )
    return ""
