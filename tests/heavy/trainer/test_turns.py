"""A trainer whose memory leaves its device between two steps, and comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    scored,
    send,
    steps,
    train,
    turn_until,
)


def test_steps_after_a_turn_of_others_are_those_that_would_have_been(tmp_path: Path) -> None:
    """Weights and moments are gone meanwhile: no step is made, and versions are served still."""
    hashes = []
    for name in ("alone", "shared"):
        log, config = make_log(), make_config(tmp_path / name)
        trainer = make_trainer(log, config)
        train(log, trainer, 1)
        if name == "shared":
            turn_until(trainer, trainer.give_up_device)
            storages = [t.untyped_storage() for t in trainer._training.learner.tensors()]
            assert {s.nbytes() for s in storages if s.resizable()} == {0}  # else a file's
            assert list(trainer._publisher._server.versions()) == [0, 1]
            send(log, *(scored(1, sample, 1) for sample in range(2)))
            for _ in range(30):
                trainer.turn()
            assert len(steps(log)) == 1
            turn_until(trainer, trainer.take_device)
        train(log, trainer, 3)
        bury(trainer)
        hashes.append([step.weight_hash for step in steps(log)])
    assert len(hashes[0]) == 3
    assert hashes[0] == hashes[1]
