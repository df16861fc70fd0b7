"""An optimizer of one's own: it trains, its state is in checkpoints, and a redo has its bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rlstreams.debug.rerun.rebuilt import steps_again
from rlstreams.debug.rerun.rerun import changed_config, rerun
from rlstreams.schemas.events import StepsRedone
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.compute.learn import Learner
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.loop.agreement import own_code
from rlstreams.workers.sandbox.recorded import OwnCodeError
from rlstreams.workers.trainer.learn.adam import LOW, Adam
from rlstreams.workers.trainer.learn.own import update_of
from rlstreams.workers.trainer.redo.redo import RedoError
from rlstreams.workers.trainer.training.made_up import made_up
from tests.heavy.trainer.own_code import write
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    read,
    steps,
    train,
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog

FIELD = "trainer.optimizer.kind"
ADAMW = "def update(parameter):\n    return parameter.adamw()\n"
MOMENTUM = """
from decays import DECAY


def update(parameter, *, scale=1.0):
    moving = parameter.state.get("moving", 0) * DECAY + parameter.gradient
    count = parameter.state.get("count", 0) + 1
    return parameter.values - scale * parameter.lr / count * moving, {
        "moving": moving, "count": count
    }
"""
DECAYS = "DECAY = 0.5\n"


def own(folder: Path, text: str = MOMENTUM, **changes: object) -> RunConfig:
    """A run in a folder with this optimizer."""
    code = folder / "code"
    write(code, mine=text, decays=DECAYS)
    return make_config(
        folder, **{FIELD: f"{code / 'mine.py'}:update", "trainer.steps": 9} | changes
    )


def trained(config: RunConfig, num: int = 3, log: MemoryLog | None = None) -> MemoryLog:
    log = make_log() if log is None else log
    trainer = make_trainer(log, config, str(num), takeover=True)
    train(log, trainer, num)
    bury(trainer)
    return log


def hashes(log: MemoryLog) -> list[str]:
    return [step.weight_hash for step in steps(log)]


def redone(log: MemoryLog) -> list[StepsRedone]:
    return [event for event in read(log, STEPS.name) if isinstance(event, StepsRedone)]


def test_ours_called_by_ones_own_gives_the_bits_of_ours(tmp_path: Path) -> None:
    ours, theirs = make_config(tmp_path / "ours"), own(tmp_path / "theirs", ADAMW)
    assert hashes(trained(ours)) == hashes(trained(theirs)) != hashes(trained(own(tmp_path / "x")))


def test_a_killed_trainer_goes_on_with_the_state_of_its_checkpoint(tmp_path: Path) -> None:
    """And with the recorded code, though its file was edited since."""
    config = own(tmp_path, **{"trainer.checkpoint_every": 2, "trainer.redo": "exact"})
    log = trained(config)
    write(tmp_path / "code", decays="DECAY = 0.75\n")
    trained(config, 4, log)
    assert [(event.first_step, event.num_equal) for event in redone(log)] == [(3, 1)]
    assert rerun(MemoryBus(log, "demo"), config, 3, checkpoints=[]).is_equal
    every = list(steps_again(MemoryBus(log, "demo"), config))
    assert [found for _, found in every] == [[]] * 4


def test_moments_are_handed_over_when_the_optimizer_changes(tmp_path: Path) -> None:
    """In both directions, by a checkpoint; and all of it is redone from the first weights."""
    every = {"trainer.checkpoint_every": 1, "trainer.redo": "exact", "trainer.steps": 9}
    log = trained(make_config(tmp_path, **every), 2)
    trained(own(tmp_path, ADAMW, **every), 3, log)
    through = trained(make_config(tmp_path / "through", **every), 3)
    assert hashes(log) == hashes(through)
    trained(own(tmp_path, **every), 5, log)
    trained(make_config(tmp_path, **every), 6, log)
    again = list(steps_again(MemoryBus(log, "demo"), make_config(tmp_path, **every)))
    assert [found for _, found in again] == [[]] * 6


def test_a_recorded_step_is_done_with_an_optimizer_that_was_not_there(tmp_path: Path) -> None:
    log, config = trained(make_config(tmp_path), 2), make_config(tmp_path)
    own(tmp_path)
    settings = [
        f"{FIELD}={tmp_path / 'code/mine.py'}:update",
        "trainer.optimizer.options.scale=2.0",
    ]
    found = rerun(MemoryBus(log, "demo"), config, 2, checkpoints=[], settings=settings)
    assert found.is_equal
    assert found.change is not None
    assert found.change.weight_hash != found.again.weight_hash
    back = changed_config(changed_config(config, settings), [f"{FIELD}=adamw"])
    assert back.trainer.optimizer == config.trainer.optimizer


KEEPS = """
KEPT = {}


def update(p):
    if not p.state:
        KEPT[p.name] = 0
    KEPT[p.name] = KEPT.get(p.name, 0) * 0.9 + p.gradient
    return p.values - p.lr * KEPT[p.name], {"count": 1}
"""


def test_one_that_keeps_something_beside_its_state_is_named_by_the_redo(tmp_path: Path) -> None:
    """Where the trial before the start could not see it: it begins anew with its state."""
    config = own(tmp_path, KEEPS, **{"trainer.checkpoint_every": 2, "trainer.redo": "exact"})
    tried = made_up(config.trainer, 2, (), own_code(config))
    assert "called twice" in tried[0]
    log = trained(config)
    trainer = make_trainer(log, config, "again", takeover=True)
    says = r"redo of step 3 gave .*code of yours keeps .*\(trainer\.optimizer\.kind: mine\.py.*\)"
    with pytest.raises(RedoError, match=says):
        train(log, trainer, 4)
    trainer.close()


def test_one_that_raises_is_named_with_what_it_was_called_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: no sample of the batch is tried by itself."""
    text = "def update(p):\n    return p.values - 1 / (2 - len(p.state)), {'n': 1, 'm': 1}\n"
    config = own(tmp_path, text)
    log = trained(config, 1)
    monkeypatch.setattr(Learner, "probe", lambda *_: pytest.fail("a sample was tried"))
    trainer = make_trainer(log, config, "two", takeover=True)
    says = rf"^step 2: {FIELD}: .*mine\.py:2: Zero.*; it was called for \S+ of .* the state n, m$"
    with pytest.raises(OwnCodeError, match=says):
        train(log, trainer, 2)
    trainer.close()


def test_one_that_fails_in_a_step_ends_the_trainer_with_place_and_parameter(tmp_path: Path) -> None:
    """Nothing is lost: the run goes on from its log with what is right."""
    config = own(tmp_path)
    log = trained(config, 1)
    write(tmp_path / "code", mine="def update(p):\n    return p.values / 0, {}\n")
    trainer = make_trainer(log, config, "two", takeover=True)
    says = rf"^step 2: {FIELD}: .*mine\.py:1 gave values for \S+ that are not finite"
    with pytest.raises(OwnCodeError, match=says):
        train(log, trainer, 2)
    trainer.close()
    own(tmp_path)
    assert len(hashes(trained(config, 2, log))) == 2


def test_a_parameter_of_16_bits_is_given_as_its_full_number(tmp_path: Path) -> None:
    """Updates add up that 16 bits alone would round away."""
    write(tmp_path, tiny="def update(p):\n    return p.values - p.lr, {}\n")
    kind = f"{tmp_path / 'tiny.py'}:update"
    section = OptimizerSection(kind=kind)
    code = {f"{FIELD}: tiny.py": (tmp_path / "tiny.py").read_text("utf-8")}
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    adam = Adam({"p": parameter})
    for _ in range(512):
        adam.take("p", torch.ones(3))
        adam.update(2.0**-14, by=update_of(section, code))
    assert parameter.tolist() == [1 - 2.0**-5] * 3
    assert adam.tensors().keys() == {f"p:{LOW}"}
