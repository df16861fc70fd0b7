"""Steps made again: differences, history, and what a changed setting may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.debug.replay.change import changed_config
from rlstreams.debug.replay.fields import differing
from rlstreams.debug.replay.history import eras, history_of
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.workers.config.load import load, resolved_json
from tests import factories
from tests.unit.recording.recordings import raw_of, record

EXAMPLE = Path(__file__).parents[3] / "infra/examples/demo.toml"


def test_a_step_made_again_elsewhere_is_equal() -> None:
    """Positions, epochs and times are not the step; anything else is."""
    step = factories.step_completed(1)
    moved = tuple(replace(ref, partition=9, offset=ref.offset + 5) for ref in step.samples)
    again = replace(step, samples=moved, epoch=4, instance="z", finished_at_ms=1)
    assert [] == differing(step, again)
    found = differing(step, replace(again, loss=0.123, metrics={"grad_norm": 9.0}))
    assert {"loss", "metrics.grad_norm"} <= {difference.field for difference in found}


def run_of_steps(folder: Path, *, first: int = 1) -> None:
    """Three steps; before the third the learning rate was changed."""
    slow = resolved_json(load([EXAMPLE]))
    fast = resolved_json(load([EXAMPLE], ["trainer.optimizer.lr=0.5"]))
    events = [factories.trainer_started(epoch=1, config=slow)]
    events += [factories.step_completed(n, epoch=1) for n in (first, first + 1)]
    events += [factories.trainer_started(epoch=2, config=fast)]
    events += [
        factories.step_completed(first + 1, epoch=1, loss=9.0),  # a zombie's
        factories.step_completed(first + 2, epoch=2),
    ]
    record(folder, [raw_of(event, n) for n, event in enumerate(events)])


def test_history_leaves_void_steps_out_and_parts_at_a_changed_configuration(
    tmp_path: Path,
) -> None:
    """A trainer replays each part under its own."""
    run_of_steps(tmp_path / "r")
    with Recording(tmp_path / "r") as recording:
        history = history_of(recording)

    assert [1, 2, 3] == [step.step for step in history.steps]
    assert 9.0 not in [step.loss for step in history.steps]
    assert [[1, 2], [3]] == [[s.step for s in era] for era in eras(history, 3)]


def test_a_recording_from_the_middle_says_so(tmp_path: Path) -> None:
    """The trainer cannot begin with step 5."""
    run_of_steps(tmp_path / "r", first=5)
    with (
        Recording(tmp_path / "r") as recording,
        pytest.raises(NotRecordedError, match="does not begin with step 1"),
    ):
        history_of(recording)


def test_only_what_a_chosen_batch_computes_with_can_be_changed() -> None:
    """Anything else is refused with what can."""
    config = load([EXAMPLE])

    assert 0.3 == changed_config(config, ["trainer.loss.clip_high=0.3"]).trainer.loss.clip_high
    with pytest.raises(ConfigError, match=r"trainer.steps.*chosen already.*trainer.loss"):
        changed_config(config, ["trainer.steps=3"])
    with pytest.raises(ConfigError, match=r"did you mean trainer\.loss\.clip_high"):
        changed_config(config, ["trainer.loss.clip_hihg=3"])
