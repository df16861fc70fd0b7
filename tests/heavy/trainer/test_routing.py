"""Routing replay in a run: recorded routes change the step, and come back with a redo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlstreams.debug.rerun.rerun import rerun
from rlstreams.schemas.events import DeadLetter, GroupsDropped, ScoredTrajectory, Tensor
from rlstreams.streams.log.topics import DEAD_LETTERS, STEPS
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
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog

LAYERS, EXPERTS = 2, 8  # of the demo's model
ROWS = 7  # of a sample of three and five tokens


def routed(group: int, sample: int, version: int = 0, **changes: object) -> ScoredTrajectory:
    """A sample whose tokens went to experts drawn at random; the fifth row is not recorded."""
    draw = np.random.default_rng((group, sample, 1))
    first = draw.integers(0, EXPERTS, (ROWS, LAYERS, 1))
    rows = np.concatenate([first, (first + draw.integers(1, EXPERTS, first.shape)) % EXPERTS], -1)
    mask = np.ones(ROWS, np.uint8)
    mask[4] = 0
    experts = {
        "routed_experts": Tensor.of(rows.astype(np.uint8), "zstd"),
        "routed_experts_mask": Tensor.of(mask),
    }
    return replace(scored(group, sample, version, **(experts | changes)), routing_replayed=True)


def run(log: MemoryLog, folder: Path, num_steps: int, **overrides: object) -> None:
    """A trainer of its own does what is left to do."""
    config = make_config(folder, trainer__steps=num_steps, **overrides)
    trainer = make_trainer(log, config, f"to-{num_steps}", takeover=True)
    run_steps(log, trainer, num_steps)
    bury(trainer)


def test_recorded_routes_make_the_step_and_its_redo(tmp_path: Path) -> None:
    """Killed behind two steps, the second one under recomputed layers; the redo is exact, whatever
    is set now."""
    log = make_log()
    send(log, *(routed(0, sample) for sample in range(2)))
    run(log, tmp_path, 1, trainer__routing_replay="true")
    send(log, *(routed(1, sample, 1) for sample in range(2)))
    changes = {"trainer__routing_replay": "true", "trainer__activation_checkpointing": "true"}
    run(log, tmp_path, 2, **changes)
    metrics = [step.metrics for step in steps(log)]
    assert [m["routing_recorded"] for m in metrics] == [pytest.approx(6 / 7)] * 2
    assert all(0.5 < m["routing_flips"] <= 1 for m in metrics)
    send(log, *(scored(2, sample, 2) for sample in range(2)))
    run(log, tmp_path, 3)  # off; an unequal redo would stop it
    assert "routing_flips" not in steps(log)[-1].metrics


def test_other_routes_than_the_score_s_are_set_aside(tmp_path: Path) -> None:
    """Scored along the live router's routes, of another model, or an expert that is not there: its
    group gives its place to another."""
    log = make_log()
    live = replace(routed(0, 0), routing_replayed=False)
    wide = routed(1, 0, routed_experts=Tensor.of(np.arange(42, dtype=np.uint8).reshape(7, 3, 2)))
    beyond = routed(2, 0, routed_experts=Tensor.of(np.arange(28, dtype=np.uint8).reshape(7, 2, 2)))
    send(log, live, wide, beyond, *(routed(3, sample) for sample in range(2)))
    run(log, tmp_path, 1, trainer__routing_replay="true")
    letters = [e for e in read(log, DEAD_LETTERS.name) if isinstance(e, DeadLetter)]
    assert [(e.group_id, e.reason) for e in letters] == [(n, "validation") for n in "012"]
    assert "routing_replayed is False, but trainer.routing_replay is True" in letters[0].detail
    assert "[tokens - 1, 2, 2]: it was sampled from another model" in letters[1].detail
    assert "names expert 27, the model has 8" in letters[2].detail
    dropped = [e for e in read(log, STEPS.name) if isinstance(e, GroupsDropped)]
    assert sorted(g.group_id for e in dropped for g in e.groups) == ["0", "1", "2"]


def test_scores_along_recorded_routes_are_set_aside_where_it_is_off(tmp_path: Path) -> None:
    """The other way round: the trainer would choose live."""
    log = make_log()
    send(log, routed(0, 0), *(scored(1, sample, 0) for sample in range(2)))
    run(log, tmp_path, 1)
    (letter,) = (e for e in read(log, DEAD_LETTERS.name) if isinstance(e, DeadLetter))
    assert "routing_replayed is True, but trainer.routing_replay is False" in letter.detail


def test_a_recorded_step_is_re_run_to_the_bit(tmp_path: Path) -> None:
    """Along the recorded routes, whatever is set now; also with another loss."""
    log = make_log()
    send(log, *(routed(0, sample) for sample in range(2)))
    run(log, tmp_path, 1, trainer__routing_replay="true")
    found = rerun(
        MemoryBus(log, "demo"),
        make_config(tmp_path),
        1,
        checkpoints=[],
        settings=["trainer.loss.kind=cispo"],
    )
    assert found.is_equal
    assert found.change.metrics["routing_flips"] == steps(log)[0].metrics["routing_flips"]
