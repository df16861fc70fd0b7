"""Steps with every setting of the loss: several updates of one batch, a look before the first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstreams.debug.rerun.rerun import rerun
from rlstreams.schemas.events import GroupsDropped, MaskedSegment, ScoredTrajectory, StepsRedone
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.compute.learn import Learner
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import LoraSection, OptimizerSection
from rlstreams.workers.model.model import configure_torch
from rlstreams.workers.trainer.learn.advantage import advantages_by
from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError
from rlstreams.workers.trainer.learn.packing import Batch
from rlstreams.workers.trainer.learn.step import NumericsError, StepResult
from rlstreams.workers.weights.layout import weight_hash
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    read,
    run_steps,
    scored,
    send,
    steps,
    tick_until,
)
from tests.memory.bus import MemoryBus
from tests.unit.trainer import trainer_builders
from tests.unit.trainer.trainer_builders import TinyModel, floats, packed_within, random_samples

configure_torch(1)
FAST = OptimizerSection(lr=1e-2, warmup_steps=0)
SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"kind": "gspo", "reduce": "sequence"},
    "cispo": {"kind": "cispo"},
    "constant": {"reduce": "constant", "constant_tokens": 8},
    "sapo": {"kind": "sapo"},
    "dppo": {"kind": "dppo", "divergence": "kl"},
    "m2po": {"kind": "m2po", "second_moment_max": 20.0},
    "decoupled": {"proximal": "step_start"},
    "interpolated": {"proximal": "interpolated"},
    "bypass": {"proximal": "behavior", "correction": "none"},
    "icepop": {"correction": "mask", "weight_floor": 0.5, "weight_cap": 5.0},
    "mis": {"correction": "mask", "correction_level": "sequence", "weight_cap": 3.0},
    "normalized": {"weight_normalize": True, "correction_level": "geometric"},
    "rejection": {"rejection": "k3", "rejection_high": 0.05, "veto_low": 1e-4},
    "entropy": {"entropy_coef": 0.01, "entropy_share": 0.5},
    "sft": {"kind": "sft", "advantage": "one", "correction": "none", "reward_min": 0.5},
    "weighted": {"kind": "sft", "advantage": "reward", "correction": "none"},
    "rloo": {"advantage": "rloo", "overlong_tokens": 9, "overlong_buffer_tokens": 4},
}


def batch_of(by: LossSection, samples: list[ScoredTrajectory], **options: Any) -> Batch:
    return trainer_builders.batch_of(samples, by=by, **{"policy_version": 3} | options)


def stepped(by: LossSection, *batches: Batch) -> tuple[StepResult, str]:
    learner = Learner.of(TinyModel(), FAST, by)
    found = [learner.step(batch) for batch in batches]
    return found[-1], weight_hash(learner.weights())


@pytest.mark.parametrize("name", SETTINGS)
def test_masked_tokens_change_nothing(name: str) -> None:
    """Not a bit: whatever the log-probs of a masked segment are."""
    by, samples = LossSection(**SETTINGS[name]), random_samples(8)
    first = samples[0].trajectory
    number = samples[0].scores[0].segment
    segments = list(first.segments)
    behavior = segments[number].behavior_logprobs
    segments[number] = replace(
        segments[number], behavior_logprobs=floats(behavior.numpy() - np.float32(3))
    )
    moved = [
        replace(samples[0], trajectory=replace(first, segments=tuple(segments))),
        *samples[1:],
    ]
    mask = MaskedSegment(group_id=first.group_id, sample=first.sample, segment=number, staleness=9)
    one, other = (stepped(by, batch_of(by, s, masked=[mask])) for s in (samples, moved))
    assert one == other
    assert one != stepped(by, batch_of(by, moved))


def test_mini_batches_are_steps_of_their_own() -> None:
    """The same bytes as steps on each part, divided by the tokens of the part."""
    by = LossSection(proximal="sampled", kl_coef=0.0)
    samples = sorted(random_samples(16), key=lambda s: s.trajectory.group_id)
    groups = list(dict.fromkeys(s.trajectory.group_id for s in samples))
    advantages = advantages_by(
        [s.trajectory.reward for s in samples], [s.trajectory.group_id for s in samples], by
    )
    whole = packed_within(samples, advantages, [], policy_version=3, token_budget=40, minibatches=2)
    halves = []
    for own in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
        places = [i for i, s in enumerate(samples) if s.trajectory.group_id in own]
        part = [samples[i] for i in places]
        halves.append(
            packed_within(part, advantages[places], [], policy_version=3, token_budget=40)
        )
    result, made = stepped(by, whole)
    assert made == stepped(by, *halves)[1]
    assert result.metrics["updates"] == 2
    assert stepped(by, replace(whole, epochs=3))[0].metrics["updates"] == 6


def test_the_step_s_start_stays_the_anchor() -> None:
    """Of the first update the ratio is 1; of a later one it is not, and the clip is there."""
    by, samples = LossSection(proximal="step_start"), random_samples(12)
    first = stepped(by, batch_of(by, samples))[0].metrics
    assert first["ratio_max"] == pytest.approx(1, abs=1e-5)
    later = stepped(by, batch_of(by, samples, epochs=4))[0].metrics
    assert later["ratio_max"] > 1.001
    assert later["grad_norm_max"] >= later["grad_norm"]


@pytest.mark.parametrize("error", [NumericsError, OutOfMemoryError])
def test_a_later_update_that_fails_leaves_nothing(error: type[Exception]) -> None:
    """Weights and moments are as before the step; the next one is as if it had never begun."""
    by, samples = LossSection(), random_samples(12)
    batch, calm = batch_of(by, samples, epochs=2), batch_of(by, random_samples(8, 5))

    class Fragile(Learner):
        """Fails in the second update."""

        num_calls = 0

        def _gradient(self, batch: Batch, meanwhile: Any = dict) -> Any:
            self.num_calls += 1
            totals, norm = super()._gradient(batch, meanwhile)
            if self.num_calls == 2 and error is OutOfMemoryError:
                raise OutOfMemoryError(0, "told so")
            return totals, float("nan") if self.num_calls == 2 else norm

    learner, other = Fragile.of(TinyModel(), FAST, by), Learner.of(TinyModel(), FAST, by)
    before = weight_hash(learner.weights())
    with pytest.raises(error):
        learner.step(batch)
    assert (weight_hash(learner.weights()), learner.step_number) == (before, 0)
    learner.step(calm)
    other.step(calm)
    assert weight_hash(learner.weights()) == weight_hash(other.weights())


def test_a_step_of_several_updates_copies_what_learns_and_nothing_else() -> None:
    """Weights and state are not gathered for it; an adapter is all that is copied of a model."""

    class Closed(Learner):
        def weights(self) -> Any:
            pytest.fail("weights were asked for")

        def optimizer_tensors(self) -> Any:
            pytest.fail("the optimizer's state was asked for")

    by = LossSection()
    for lora in (LoraSection(), LoraSection(rank=2)):
        learner = Closed.of(TinyModel(), FAST, by, lora=lora)
        for _ in range(2):
            learner.step(batch_of(by, random_samples(12), epochs=2))
        copies = learner._kept._copies
        own = learner._plan.trained
        assert copies.keys() == own.keys()
        assert {"parameter", "step", "exp_avg", "exp_avg_sq"} == set(copies[next(iter(own))])


def test_a_mini_batch_without_a_token_is_left_out() -> None:
    """It has nothing to divide by."""
    by, samples = LossSection(), sorted(random_samples(16), key=lambda s: s.trajectory.group_id)
    groups = list(dict.fromkeys(s.trajectory.group_id for s in samples))
    masks = [
        MaskedSegment(
            group_id=s.trajectory.group_id,
            sample=s.trajectory.sample,
            segment=n.segment,
            staleness=9,
        )
        for s in samples
        for n in s.scores
        if s.trajectory.group_id in groups[: len(groups) // 2]
    ]
    batch = batch_of(by, samples, masked=masks, minibatches=2)
    assert len(batch.updates) == 1
    assert np.isfinite(stepped(by, batch)[0].loss)


# Of each way that a step goes about its batch one; what differs by a formula only is left out.
WAYS = ("gspo", "m2po", "decoupled", "interpolated", "normalized", "rejection", "entropy", "sft")


@pytest.mark.parametrize("name", WAYS)
def test_redo_is_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    """A trainer is killed after two steps of several updates; another does them again."""
    changes = {f"trainer__loss__{k}": str(v).lower() for k, v in SETTINGS[name].items()}
    changes |= {"trainer__groups_per_step": 2, "trainer__minibatches": 2, "trainer__steps": 3}
    changes |= {"trainer__batch_epochs": 2, "trainer__optimizer__schedule": "cosine"}
    changes |= {"trainer__optimizer__decay_steps": 9}
    changes |= {"rollout__max_new_tokens": 9, "trainer__micro_batch_tokens": 20}
    log, config = make_log(), make_config(tmp_path, **changes)
    first = make_trainer(log, config)
    for step in range(2):
        groups = (2 * step, 2 * step + 1)
        send(log, *(scored(g, s, step, reward=float(s)) for g in groups for s in range(2)))
        run_steps(log, first, step + 1)
    bury(first)
    assert [s.metrics["updates"] for s in steps(log)] == [4, 4]
    assert steps(log)[0].weight_hash != steps(log)[1].weight_hash
    second = make_trainer(log, config, "two", takeover=True)
    tick_until(second, lambda: second._reporter.policy_version >= 2)
    second.close()
    (redone,) = [e for e in read(log, STEPS.name) if isinstance(e, StepsRedone)]
    assert (redone.first_step, redone.last_step, redone.num_equal) == (1, 2, 2)


def test_a_step_is_tried_with_other_mini_batches(tmp_path: Path) -> None:
    """`replay step`: equal as it was recorded, and cut anew where the change asks for it."""
    log = make_log()
    config = make_config(
        tmp_path, trainer__groups_per_step=2, trainer__minibatches=2, trainer__steps=1
    )
    trainer = make_trainer(log, config)
    send(log, *(scored(g, s, 0, reward=float(s)) for g in range(2) for s in range(2)))
    run_steps(log, trainer, 1)
    trainer.close()
    found = rerun(
        MemoryBus(log, "demo"),
        config,
        1,
        checkpoints=[],
        settings=["trainer.minibatches=1"],
    )
    assert found.is_equal, [f for f in found.findings if not f.is_equal]
    assert "updates" not in found.change.metrics
    assert found.change.weight_hash != found.again.weight_hash


def test_one_update_of_mixed_groups_whose_samples_are_micro_batches_of_their_own(
    tmp_path: Path,
) -> None:
    """As verl is usually set up: old log-probs from the step's start, groups of equal rewards left
    out beside an advantage over the batch. A sample longer than a micro-batch is one by itself."""
    log = make_log()
    asked = {
        "trainer__loss__proximal": "step_start",
        "trainer__loss__advantage": "reinforce++",
        "trainer__equal_rewards": "drop",
        "trainer__micro_batch_tokens": 4,
    }
    first = make_trainer(log, make_config(tmp_path, **asked))
    send(log, *(scored(0, sample, 0, reward=1.0) for sample in range(2)))
    send(log, *(scored(1, sample, 0) for sample in range(2)))
    run_steps(log, first, 1)
    bury(first)
    (event,) = steps(log)
    assert (["1", "1"], (1, 1)) == ([ref.group_id for ref in event.samples], event.micro_batches)
    assert event.metrics["ratio_max"] == pytest.approx(1.0)
    (dropped,) = [e for e in read(log, STEPS.name) if isinstance(e, GroupsDropped)]
    assert [("0", "no_signal")] == [(group.group_id, group.reason) for group in dropped.groups]
    assert rerun(MemoryBus(log, "demo"), make_config(tmp_path, **asked), 1, checkpoints=[]).is_equal
