"""A sample that no step can take: its group is dropped, the step is made of the others."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlstreams.debug.rerun.rerun import rerun
from rlstreams.schemas.events import (
    DeadLetter,
    GroupsDropped,
    MaskedSegment,
    ScoredTrajectory,
    StepCompleted,
    Tensor,
)
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED, STEPS
from rlstreams.workers.trainer.intake.payloads import payload_of
from rlstreams.workers.trainer.intake.validation import validate
from rlstreams.workers.trainer.learn.step import NumericsError
from rlstreams.workers.trainer.training.training import Trained, Training, UntrainableSample
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
from tests.memory.log import MemoryLog
from tests.unit.roles.stand import DEADLINE_S

BAD = 101  # a token that the samples of `scored` never have
LONG = 40  # tokens


class Numbers(Training):
    """A model that is NaN wherever a sequence has the token BAD."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        embedding_of(self).register_forward_hook(_spoil)


def embedding_of(training: Training) -> torch.nn.Module:
    """What every forward begins with, whichever way the head is called."""
    model: Any = training.learner._shards.model
    embedding: torch.nn.Module = model.get_input_embeddings()
    return embedding


def _spoil(_module: object, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return torch.where((args[0] == BAD)[..., None], torch.nan, output)


class Found(Numbers):
    """Has found what is wrong, and did not come to say so."""

    is_found: threading.Event
    go_on: threading.Event

    def try_train(self, *args: Any) -> Trained | tuple[UntrainableSample, ...]:
        result = super().try_train(*args)
        self.is_found.set()
        assert self.go_on.wait(DEADLINE_S)
        return result


class Memory(Training):
    """An accelerator with room for this many tokens at a time."""

    room = 16

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        embedding_of(self).register_forward_pre_hook(self._allocate)

    def _allocate(self, _module: object, args: tuple[torch.Tensor]) -> None:
        if args[0].numel() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Roomy(Memory):
    """The same with room for everything."""

    room = 1 << 30


def answered(group: int, sample: int, token_ids: list[int]) -> ScoredTrajectory:
    """A sample with this answer."""
    plain = scored(group, sample, 0)
    logprobs = Tensor.of(np.full(len(token_ids), -1.0, np.float32))
    prompt, policy = plain.trajectory.segments
    policy = dataclasses.replace(
        policy, token_ids=Tensor.of(np.array(token_ids, np.int32)), behavior_logprobs=logprobs
    )
    (score,) = plain.scores
    return dataclasses.replace(
        plain,
        trajectory=dataclasses.replace(plain.trajectory, segments=(prompt, policy)),
        scores=(dataclasses.replace(score, proximal_logprobs=logprobs),),
    )


def letters(log: MemoryLog) -> list[DeadLetter]:
    return [event for event in read(log, DEAD_LETTERS.name) if isinstance(event, DeadLetter)]


def drops(log: MemoryLog) -> list[tuple[str, str, bool]]:
    return [
        (group.group_id, group.reason, group.permanent)
        for event in read(log, STEPS.name)
        if isinstance(event, GroupsDropped)
        for group in event.groups
    ]


def order(log: MemoryLog) -> list[str]:
    kinds = (StepCompleted, GroupsDropped)
    return [type(event).__name__ for event in read(log, STEPS.name) if isinstance(event, kinds)]


@pytest.mark.parametrize(
    ("hardware", "said", "reason", "detail"),
    [
        (Numbers, [5, BAD, 6], "numerics", "loss is nan"),
        (Memory, [5] * LONG, "memory", "CUDA out of memory"),
    ],
)
def test_a_sample_that_no_step_can_take_costs_its_group(
    tmp_path: Path, hardware: type[Training], said: list[int], reason: str, detail: str
) -> None:
    """Found by itself, set aside with its bytes, dropped before the step that does without it.
    Where memory is short no cut of the batch helps."""
    log, config = make_log(), make_config(tmp_path, trainer__groups_per_step=2, trainer__steps=1)
    trainer = make_trainer(log, config, hardware=hardware)
    send(log, scored(0, 0, 0), answered(0, 1, said))
    send(log, *(scored(group, sample, 0) for group in (1, 2) for sample in range(2)))
    run_steps(log, trainer, 1)
    trainer.close()
    (letter,) = letters(log)
    assert (letter.group_id, letter.sample, letter.reason) == ("0", 1, reason)
    assert (letter.origin_topic, letter.origin_offset, letter.permanent) == (SCORED.name, 1, False)
    assert letter.detail.startswith(detail)
    assert drops(log) == [("0", reason, False)]
    assert order(log) == ["GroupsDropped", "StepCompleted"]
    (step,) = steps(log)
    assert [(ref.group_id, ref.sample) for ref in step.samples] == [
        ("1", 0), ("1", 1), ("2", 0), ("2", 1)
    ]  # fmt: skip
    assert step.closed.watermark == 3


def test_a_restart_between_finding_and_dropping_finds_it_again(tmp_path: Path) -> None:
    """Nothing of it was written: the successor plans the same batch, and drops the same group."""
    log, config = make_log(), make_config(tmp_path, trainer__groups_per_step=2, trainer__steps=2)
    Found.is_found, Found.go_on = threading.Event(), threading.Event()
    first = make_trainer(log, config, hardware=Found)
    send(log, scored(0, 0, 0), answered(0, 1, [5, BAD, 6]))
    send(log, *(scored(1, sample, 0) for sample in range(2)))
    tick_until(first, Found.is_found.is_set)
    Found.go_on.set()
    bury(first)
    assert drops(log) == []
    second = make_trainer(log, config, "two", takeover=True, hardware=Numbers)
    send(log, *(scored(2, sample, 0) for sample in range(2)))
    run_steps(log, second, 1)
    bury(second)
    third = make_trainer(log, config, "three", takeover=True, hardware=Numbers)
    send(log, *(scored(group, sample, 1) for group in (3, 4) for sample in range(2)))
    run_steps(log, third, 2)  # the first one was done again with an equal hash
    third.close()
    assert drops(log) == [("0", "numerics", False)]
    assert len(letters(log)) == 1


def test_a_sample_of_which_nothing_is_learnt_is_nobodys_fault(tmp_path: Path) -> None:
    """What it said is masked, and of its second answer no token came: it is not tried alone."""
    config = make_config(tmp_path)
    training = Numbers(Path(config.model.path), config.trainer, threads=1)
    silent = scored(0, 0, 0)
    empty = Tensor.of(np.zeros(0, np.float32))
    nothing = dataclasses.replace(
        silent.trajectory.segments[1],
        token_ids=Tensor.of(np.zeros(0, np.int32)),
        behavior_logprobs=empty,
    )
    silent = dataclasses.replace(
        silent,
        trajectory=dataclasses.replace(
            silent.trajectory, segments=(*silent.trajectory.segments, nothing)
        ),
        scores=(
            *silent.scores,
            dataclasses.replace(silent.scores[0], segment=2, proximal_logprobs=empty),
        ),
    )
    validate(silent, training.vocab_size, training.max_tokens)
    records = [outgoing(SCORED, event) for event in (silent, answered(1, 0, [5, BAD]))]
    log = make_log()
    MemoryBus(log, "demo").producer("logprob.0").commit(records)
    raws = MemoryBus(log, "demo").reader(MemoryBus(log, "demo").beginnings(SCORED.name))
    payloads = [payload_of(raw, {}) for raw in raws.poll(10, 0.0)]
    masked = [MaskedSegment(group_id="0", sample=0, segment=1, staleness=3)]
    found = training.try_train(payloads, masked, 3)
    assert [bad.index for bad in found] == [1]


def test_weights_that_are_at_fault_stop_the_trainer(tmp_path: Path) -> None:
    """Where every group fails by itself, dropping them all would hide it."""
    log, config = make_log(), make_config(tmp_path, trainer__groups_per_step=2)
    trainer = make_trainer(log, config, hardware=Numbers)
    send(log, *(answered(group, sample, [5, BAD]) for group in (0, 1) for sample in range(2)))
    with pytest.raises(NumericsError, match="step 1: loss is nan; so does every group"):
        tick_until(trainer, lambda: False)
    trainer.close()
    assert drops(log) == []


def test_a_broken_weight_is_named(tmp_path: Path) -> None:
    """No sample is asked for what a parameter did."""
    log, config = make_log(), make_config(tmp_path)
    trainer = make_trainer(log, config)
    name, weight = next(iter(trainer._training.learner.weights().items()))
    weight.view(-1)[:] = torch.inf
    send(log, *(scored(0, sample, 0) for sample in range(2)))
    with pytest.raises(NumericsError, match=f"weights are at fault: {name} is not finite"):
        tick_until(trainer, lambda: False)
    trainer.close()
    assert drops(log) == []


def test_a_batch_that_does_not_fit_is_cut_and_redone_alike(tmp_path: Path) -> None:
    """The borders in force are the step's: whoever has more memory cuts there too, bit for bit."""
    log, config = make_log(), make_config(tmp_path, trainer__groups_per_step=2, trainer__steps=2)
    first = make_trainer(log, config, hardware=Memory)
    send(log, *(scored(group, sample, 0) for group in (0, 1) for sample in range(2)))
    run_steps(log, first, 1)
    bury(first)
    assert [step.micro_batches for step in steps(log)] == [(2, 2)]
    second = make_trainer(log, config, "two", takeover=True, hardware=Roomy)
    send(log, *(scored(group, sample, 1) for group in (2, 3) for sample in range(2)))
    run_steps(log, second, 2)  # `redo = "exact"` would have stopped it
    second.close()
    assert [step.micro_batches for step in steps(log)] == [(2, 2), (4,)]
    assert (drops(log), letters(log)) == ([], [])
    again = rerun(MemoryBus(log, "demo"), config, 1, checkpoints=[])
    assert [finding for finding in again.findings if not finding.is_equal] == []


def test_a_long_step_tells_of_its_micro_batches(tmp_path: Path) -> None:
    """Progress that the stall watches see, also before the first step is done."""
    log, config = make_log(), make_config(tmp_path, trainer__steps=1)
    trainer = make_trainer(log, config)
    send(log, *(scored(0, sample, 0) for sample in range(2)))
    deadline = time.monotonic() + 60
    while not trainer._reporter._counters["micro_batches"]:
        assert time.monotonic() < deadline, "no micro-batch was told of"
        trainer.tick()
    trainer.close()
