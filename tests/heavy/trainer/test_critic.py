"""A critic in the trainer: redone to the bit, in checkpoints, and no part of what is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlstreams.schemas.events import StepsRedone
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.trainer.redo.redo import Unequal, drift_error
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
from tests.memory.log import MemoryLog

HEAD = {"value_head.weight:value", "value_head.bias:value"}


def config_of(folder: Path, **changes: Any) -> RunConfig:
    return make_config(
        folder,
        **{
            "trainer__groups_per_step": 2,
            "trainer__loss__advantage": "gae",
            "trainer__loss__gae_lambda": 0.9,
            "trainer__loss__value_warmup_steps": 1,
            "rollout__max_new_tokens": 9,
            "trainer__micro_batch_tokens": 20,
        }
        | changes,
    )


def feed(log: MemoryLog, step: int) -> None:
    groups = (2 * step, 2 * step + 1)
    send(log, *(scored(g, s, step, reward=float(s)) for g in groups for s in range(2)))


@pytest.mark.parametrize("checkpoint_every", [1, 100])
@pytest.mark.parametrize("updates", [1, 2])
def test_redo_is_equal_to_the_bit(checkpoint_every: int, updates: int, tmp_path: Path) -> None:
    """Weights and value head, from version 0 and from a checkpoint; the first step is warm-up, in
    which the head alone learns."""
    log = make_log()
    config = config_of(
        tmp_path,
        trainer__checkpoint_every=checkpoint_every + 1,
        trainer__minibatches=updates,
        trainer__steps=4,
    )
    first = make_trainer(log, config)
    before = first._training.weight_hash
    for step in range(3):
        feed(log, step)
        run_steps(log, first, step + 1)
    bury(first)
    done = steps(log)
    assert done[0].weight_hash == before != done[1].weight_hash != done[2].weight_hash
    assert len({one.value_head_hash for one in done} | {""}) == 4
    assert all({"value_loss", "explained_variance"} <= one.metrics.keys() for one in done)
    second = make_trainer(log, config, "two", takeover=True)
    tick_until(second, lambda: second._reporter.policy_version >= 3)
    assert second._training.weight_hash == done[-1].weight_hash
    feed(log, 3)
    run_steps(log, second, 4)
    second.close()
    (redone,) = [e for e in read(log, STEPS.name) if isinstance(e, StepsRedone)]
    start = 3 if checkpoint_every == 1 else 1
    assert (redone.first_step, redone.last_step) == (start, 3)
    assert redone.num_equal == redone.last_step - redone.first_step + 1


def test_the_head_is_in_the_checkpoint_alone(tmp_path: Path) -> None:
    """Its values and its moments; what is published has the folder's names."""
    log, config = make_log(), config_of(tmp_path, trainer__steps=3, trainer__checkpoint_every=2)
    trainer = make_trainer(log, config)
    names = set(trainer._training.learner.weights())
    for step in range(2):
        feed(log, step)
        run_steps(log, trainer, step + 1)
    tick_until(trainer, lambda: any(tmp_path.glob("checkpoints/[0-9]*/manifest.json")))
    trainer.close()
    (folder,) = (path.parent for path in tmp_path.rglob("optimizer.safetensors"))
    assert set(load_file(folder / "model.safetensors")) == names
    held = set(load_file(folder / "optimizer.safetensors"))
    assert held >= HEAD | {"value_head.weight:exp_avg", "value_head.bias:exp_avg"}
    assert not any("value_head" in name for name in names)


def test_a_run_has_a_critic_or_has_none(tmp_path: Path) -> None:
    """A trainer refuses to go on with one that its checkpoints lack, and to do without it."""
    log, config = make_log(), config_of(tmp_path, trainer__steps=2)
    trainer = make_trainer(log, config)
    training = trainer._training
    feed(log, 0)
    run_steps(log, trainer, 1)
    trainer.close()
    other = make_config(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer.loss.advantage was gae and is grpo"):
        tick_until(make_trainer(log, other, "two", takeover=True), lambda: False)
    plain = make_trainer(make_log(), make_config(tmp_path / "plain"))._training
    with pytest.raises(ConfigError, match=r"'gae', but this trainer began with 'grpo'"):
        plain.configure(config.trainer)
    assert training.learner._loss == LossSection(
        advantage="gae", gae_lambda=0.9, value_warmup_steps=1
    )


def test_a_redo_that_gives_another_head_is_named() -> None:
    """With both hashes of it, for those of the weights are alike."""
    unequal = Unequal(step=3, expected="w", actual="w", value_heads=("v", "u"))
    message = str(drift_error(unequal, {}, {}))
    assert message.startswith("redo of step 3 gave a value head u, the ledger says v")
