"""A loss of the user's own that does not end on another rank than 0: reports name it."""

from __future__ import annotations

from pathlib import Path

from rlstreams.workers.compute.team import Team
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.trainer.training.training import Training
from tests.heavy.trainer.own_code import write
from tests.heavy.trainer.test_own_loss import details, own
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_log,
    make_trainer,
    scored,
    send,
    steps,
    tick_until,
)

HANGS = """
import pathlib, time, torch.distributed

def loss(tokens):
    while torch.distributed.get_rank() == 1 and not pathlib.Path({!r}).exists():
        time.sleep(0.01)
    return -tokens.policy_N
"""


class TwoRanks(Training):
    """On the CPU."""

    def __init__(self, folder: Path, section: TrainerSection, threads: int) -> None:
        super().__init__(folder, section, threads=threads, team=Team([""]))


def test_a_loss_that_does_not_end_on_another_rank_is_named_in_reports(tmp_path: Path) -> None:
    """Rank 0 waits for that rank in a collective, and is in no function of the user's."""
    config, ends = (
        own(tmp_path, **{"trainer.ranks": 2, "trainer.micro_batch_tokens": 8}),
        tmp_path / "ends",
    )
    code = tmp_path / "code"
    write(code, my_loss=HANGS.format(str(ends)))
    log = make_log()
    trainer = make_trainer(log, config, hardware=TwoRanks)
    team = trainer._training.learner.mesh.team
    assert isinstance(team, Team)
    (process,) = team.processes
    send(log, *(scored(0, sample, 0) for sample in range(2)))
    told = f"step 1; rank 1 of the trainer (process {process}) is in trainer.loss.kind of "
    told += f"{code / 'my_loss.py'}:4"
    tick_until(trainer, lambda: told in details(log))
    ends.touch()
    tick_until(trainer, lambda: len(steps(log)) == 1)
    tick_until(trainer, lambda: team.slow_calls() == "")
    bury(trainer)
    trainer._training.learner.leave()  # the next test meets ranks of its own
    team.close()
