"""A trainer whose memory leaves its device between two steps, and comes back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlstreams.schemas.events import StepsRedone
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.compute.team import Team
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.trainer.training.training import Training
from tests.heavy.trainer.parallel_stand import leave
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


@pytest.fixture
def team() -> Iterator[Team]:
    """Rank 0 is this process; the other one serves one trainer after the other."""
    with closing(Team([""])) as made:
        yield made


def test_two_ranks_take_shifts_and_their_steps_are_redone(tmp_path: Path, team: Team) -> None:
    """With a shift of others between two steps, without, and again from the log by a successor:
    the same bits."""

    class TwoRanks(Training):
        def __init__(self, folder: Path, section: TrainerSection, threads: int) -> None:
            super().__init__(folder, section, threads, team=team)

    hashes = []
    for name in ("alone", "shared"):
        log = make_log()
        config = make_config(tmp_path / name, trainer__ranks=2, trainer__redo="exact")
        trainer = make_trainer(log, config, hardware=TwoRanks)
        train(log, trainer, 1)
        if name == "shared":
            tick_until(trainer, trainer.give_up_device)
            learner = trainer._training.learner
            own = [t.untyped_storage() for t in learner._shards.rows.values()]  # type: ignore[attr-defined]
            assert {0} == {storage.nbytes() for storage in own}
            tick_until(trainer, trainer.take_device)
        train(log, trainer, 3)
        hashes.append([step.weight_hash for step in steps(log)])
        bury(trainer)
        leave(trainer._training)
    assert 3 == len(hashes[0])
    assert hashes[0] == hashes[1]
    successor = make_trainer(log, config, "two", takeover=True, hardware=TwoRanks)
    tick_until(successor, lambda: successor._reporter.policy_version >= 3)
    successor.close()
    (redone,) = [event for event in read(log, STEPS.name) if isinstance(event, StepsRedone)]
    assert (1, 3, 3) == (redone.first_step, redone.last_step, redone.num_equal)


def test_steps_after_a_shift_of_others_are_those_that_would_have_been(tmp_path: Path) -> None:
    """Weights and moments are gone meanwhile: no step is made, and versions are served still."""
    hashes = []
    for name in ("alone", "shared"):
        log, config = make_log(), make_config(tmp_path / name)
        trainer = make_trainer(log, config)
        train(log, trainer, 1)
        if name == "shared":
            tick_until(trainer, trainer.give_up_device)
            storages = [t.untyped_storage() for t in trainer._training.learner.tensors()]
            assert {s.nbytes() for s in storages if s.resizable()} == {0}  # else a file's
            assert list(trainer._publisher._server.versions()) == [0, 1]
            send(log, *(scored(1, sample, 1) for sample in range(2)))
            for _ in range(30):
                trainer.tick()
            assert len(steps(log)) == 1
            tick_until(trainer, trainer.take_device)
        train(log, trainer, 3)
        bury(trainer)
        hashes.append([step.weight_hash for step in steps(log)])
    assert len(hashes[0]) == 3
    assert hashes[0] == hashes[1]
