"""A rank stopped, silent or unable to begin is named, and all end; killed: `test_rank_scorer`."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.compute.team import FollowerError, Team
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.one_order import NoOrderError
from rlstreams.workers.trainer.training.training import Training
from tests.heavy.trainer.parallel_stand import batch_of, make_model, two_ranks

STOPPED_S = 10.0
SILENT_S = 3.0  # three times as long as between two words of a rank
RANKS_OF_THEIR_OWN = True  # with their reapers: see `conftest.py`
ODD = "tests.heavy.trainer.odd_follower"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_a_silent_rank_is_named_and_ended() -> None:
    """Stopped, it says nothing, and nobody waits for it for ever."""
    with closing(Team([""], program=ODD)) as team:
        team._silent_s = SILENT_S
        (process,) = team.processes
        os.kill(process, signal.SIGSTOP)
        told = rf"rank 1 of the trainer \(process {process}\) has said nothing for 3 s"
        with pytest.raises(FollowerError, match=told):
            team.together(lambda: None, "idle")
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_ended(folder: Path) -> None:
    """Rank 0 does not wait for it in a collective for ever."""
    with closing(two_ranks(folder)) as trained:
        team = trained.learner.mesh.team
        assert team is not None
        team._silent_s = SILENT_S
        (process,) = team.processes
        os.kill(process, signal.SIGSTOP)
        told = rf"rank 1 of the trainer \(process {process}\) has said nothing for 3 s"
        with pytest.raises(FollowerError, match=told):
            trained.learner.step(batch_of(0))
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_rank_that_speaks_and_never_finishes_is_named() -> None:
    """Alive is not enough: what all do together has a deadline, whatever the transport has."""
    with closing(Team([""], program=ODD, together_s=1.0)) as team:
        told = (
            rf"rank 1 of the trainer \(process {team.processes[0]}\) did not do its part within 1 s"
        )
        with pytest.raises(FollowerError, match=told):
            team.together(lambda: None, "idle")


def test_a_rank_that_a_function_of_the_user_s_keeps_is_named_with_it() -> None:
    """As it says itself: the ranks that wait for it are in no such function."""
    with closing(Team([""], program=ODD, together_s=2.0)) as team:
        rank = rf"rank 1 of the trainer \(process {team.processes[0]}\)"
        told = rf"{rank}, in trainer\.loss\.kind of mine\.py:3, did not do its part within 2 s"
        with pytest.raises(FollowerError, match=told):
            team.together(lambda: None, "slow", "in trainer.loss.kind of mine.py:3")


def test_whoever_waits_for_ranks_is_told_of_their_end() -> None:
    """A trainer that is closed in the middle of a step does not wait for it."""
    begun = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        team = Team([""], program=ODD)
        waiting = thread.submit(team.together, begun.set, "idle")
        assert begun.wait(STOPPED_S)
        team.close()
        with pytest.raises(FollowerError, match="the ranks of the trainer were ended meanwhile"):
            waiting.result(timeout=STOPPED_S)


@pytest.mark.parametrize("kind", [NoOrderError, ConfigError])
def test_what_one_rank_alone_refuses_is_told_as_such(kind: type[Exception]) -> None:
    """Not as a rank that died, after which all would start again."""
    with closing(Team([""], program=ODD)) as team, pytest.raises(kind, match="roll_cuda"):
        team.together(lambda: None, kind.__name__)


def test_ranks_end_with_a_trainer_that_cannot_begin(tmp_path: Path) -> None:
    """A model folder that is none: nobody holds the followers, or the folder where they meet."""
    team = Team([""], program=ODD)
    with pytest.raises(EngineError, match=r"config\.json"):
        Training(tmp_path, TrainerSection(ranks=2), threads=1, team=team)
    assert not Path(team.new_meeting().name).parent.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(team.processes[0], 0)
