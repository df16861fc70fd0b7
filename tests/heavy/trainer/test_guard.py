"""A trainer whose samplers have other weights than they say pauses the run before the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlstreams.schemas.events import ControlState, ScoredTrajectory, Tensor
from rlstreams.streams.log.topics import CONTROL
from rlstreams.workers.trainer.worker import TrainerWorker
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    read,
    scored,
    send,
    steps,
    tick_until,
    train,
)
from tests.memory.log import MemoryLog


def off_by(nats: float, group: int, version: int) -> list[ScoredTrajectory]:
    """A group of which the scorer says something else than the sampler."""
    found = []
    for sample in range(2):
        one = scored(group, sample, version)
        far = Tensor.of(np.full(5, -1.0 - nats, np.float32))
        score = replace(one.scores[0], proximal_logprobs=far)
        found.append(replace(one, scores=(score,)))
    return found


def pauses(log: MemoryLog) -> list[ControlState]:
    return [event for event in read(log, CONTROL.name) if isinstance(event, ControlState)]


def paused(log: MemoryLog, trainer: TrainerWorker, num: int) -> ControlState:
    """Until it was said so often; then the role is paused, as its follower of `control` does it."""
    tick_until(trainer, lambda: len(pauses(log)) == num)
    trainer.is_paused = True
    for _ in range(20):
        trainer.tick()
    assert len(pauses(log)) == num  # once
    return pauses(log)[-1]


def test_it_pauses_before_the_step_also_after_a_restart_and_goes_on_as_told(tmp_path: Path) -> None:
    """What a restart knows of the first steps is in the log: 0.05 nats are noise to who has none.
    Resumed, it makes the step that it would have made."""
    hashes = []
    for action in ("off", "pause"):
        log, config = (
            make_log(),
            make_config(tmp_path / action, guard__action=action, trainer__steps=9),
        )
        trainer = make_trainer(log, config)
        train(log, trainer, 2)
        send(log, *off_by(0.05, 2, 2))
        if action == "pause":
            said = paused(log, trainer, 1)
            assert (said.state, said.by) == ("paused", "trainer-0")
            assert said.reason.startswith("rollout-0 (builtin 1) under version 2 does not sample")
            assert "rlstreams control resume" in said.reason
            assert len(steps(log)) == 2
            bury(trainer)
            trainer = make_trainer(log, config, "two", takeover=True)
            assert paused(log, trainer, 2).reason == said.reason
            assert len(steps(log)) == 2
            trainer.is_paused = False
        tick_until(trainer, lambda log=log: len(steps(log)) == 3)  # type: ignore[misc]
        train(log, trainer, 4)  # and the next, sound one is no alarm
        assert len(pauses(log)) == (2 if action == "pause" else 0)
        hashes.append([step.weight_hash for step in steps(log)])
        bury(trainer)
    assert hashes[0] == hashes[1]


def test_a_restart_takes_no_alarmed_step_for_noise(tmp_path: Path) -> None:
    """Resumed once, it says so again of the next such batch, with a restart between them or not."""
    log, config = make_log(), make_config(tmp_path, guard__action="pause", trainer__steps=9)
    trainer = make_trainer(log, config)
    train(log, trainer, 1)
    send(log, *off_by(0.05, 1, 1))
    paused(log, trainer, 1)
    trainer.is_paused = False
    tick_until(trainer, lambda: len(steps(log)) == 2)
    assert [step.metrics.get("guard_alarm") for step in steps(log)] == [None, 1.0]
    bury(trainer)
    trainer = make_trainer(log, config, "two", takeover=True)
    send(log, *off_by(0.05, 2, 2))
    assert "under version 2 does not sample" in paused(log, trainer, 2).reason
    assert len(steps(log)) == 2
    bury(trainer)


def test_who_is_drained_meanwhile_makes_no_step(tmp_path: Path) -> None:
    log, config = make_log(), make_config(tmp_path, guard__action="pause")
    trainer = make_trainer(log, config)
    train(log, trainer, 1)
    send(log, *off_by(0.5, 1, 1))
    paused(log, trainer, 1)
    trainer.drain()
    tick_until(trainer, lambda: trainer.done)
    assert len(steps(log)) == 1
    trainer.close()


@pytest.mark.parametrize("action", ["pause", "warn"])
def test_a_trainer_that_scores_by_itself_pauses_behind_the_step(
    action: str, tmp_path: Path
) -> None:
    """The sampler's made-up log-probs are not this model's; who only warns goes on."""
    log = make_log()
    config = make_config(tmp_path, guard__action=action, logprob__place="trainer",
                         trainer__loss__proximal="step_start")  # fmt: skip
    trainer = make_trainer(log, config)
    send(log, *(replace(scored(0, sample, 0), scores=tuple(
        replace(score, anchor="behavior", policy_version=-1)
        for score in scored(0, sample, 0).scores
    )) for sample in range(2)))  # fmt: skip
    tick_until(trainer, lambda: len(steps(log)) == 1)
    if action == "pause":
        assert "between the log-probs of sampler and trainer" in paused(log, trainer, 1).reason
    else:
        for _ in range(20):
            trainer.tick()
        assert not pauses(log)
    bury(trainer)
