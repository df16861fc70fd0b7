"""A rank on another host, which here is another address of the loopback; a real network of two is
`test_rank_network`'s."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.compute.hosts import Hosts, reach
from rlstreams.workers.compute.rank_server import make_rank_server
from rlstreams.workers.compute.team import FollowerError, Team
from rlstreams.workers.config.run import ModelSection, RunConfig, WeightsSection
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.model.base import VISIBLE, RankLostError
from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError
from rlstreams.workers.trainer.learn.step import StepResult
from tests.containers import wait_until
from tests.heavy.trainer.parallel_stand import batch_of, hashes, make_model, other_host, two_ranks
from tests.heavy.trainer.test_parallel_deaths import ODD

POOR = "tests.heavy.trainer.poor_follower"
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def made(folder: Path, hosts: Hosts | None) -> tuple[StepResult, tuple[str, str]]:
    """Two steps, between which the second rank lacks memory, so that all meet in a new group."""
    with closing(two_ranks(folder, program=POOR, hosts=hosts)) as two:
        two.learner.step(batch_of(0))
        with pytest.raises(OutOfMemoryError, match=r"rank 1: .*this rank is poor"):
            two.learner.step(batch_of(1, token_budget=70))
        return two.learner.step(batch_of(1)), hashes(two)


def test_two_hosts_give_the_bits_of_one(folder: Path) -> None:
    """Loss, metrics, weights and moments."""
    here = made(folder, None)
    with other_host(folder, POOR) as hosts:
        assert made(folder, hosts) == here


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"secret": "of one alone"}, "the secret is not this run's"),
        ({"versions": {"torch": "1.0"}}, r"torch is \d\S* here and 1\.0 at the trainer"),
        ({"device": "cuda", "ranks": 3}, "asks for 3 ranks, and 2 GPUs are visible"),
        ({"model": "9c02"}, r"model in '.*' has fingerprint \w{12}, that of the trainer 9c02"),
    ],
)
def test_what_the_ends_disagree_about_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object], told: str
) -> None:
    """By the trainer, as a matter of its configuration: no other try would help."""
    monkeypatch.setenv(VISIBLE, "4,7")
    with other_host(folder) as hosts:
        (address,) = hosts.addresses
        with pytest.raises(ConfigError, match=rf"'{address}', which refuses: .*{told}"):
            reach(replace(hosts, **asked), LIMIT_S)  # type: ignore[arg-type]


def test_a_model_that_is_not_there_is_named_with_its_host(folder: Path, tmp_path: Path) -> None:
    """A path is each host's own."""
    with other_host(folder) as good, other_host(tmp_path / "gone") as bad:
        told = r"host \S+: model\.path is '\S+/gone', which is no model: .*config\.json"
        with pytest.raises(ConfigError, match=told):
            reach(replace(good, addresses=bad.addresses), LIMIT_S)


def test_a_host_that_is_not_there_is_awaited_and_named(folder: Path) -> None:
    """It may be starting."""
    with other_host(folder) as hosts:
        pass
    told = rf"'{hosts.addresses[0]}', which gave no rank within 1 s: .*refused; does `rlstreams w"
    with pytest.raises(RankLostError, match=told):
        reach(hosts, 1.0)


def test_a_host_serves_one_trainer_at_a_time(folder: Path) -> None:
    """A second one waits until the ranks of the first have ended."""
    with other_host(folder, ODD) as hosts:
        first = Team([], hosts=hosts)
        with pytest.raises(RankLostError, match="it serves another trainer"):
            reach(hosts, 1.0)
        first.close()
        Team([], hosts=hosts).close()


def test_a_killed_rank_is_named_with_its_host(folder: Path) -> None:
    """At once, and by its address."""
    with other_host(folder, ODD, served := []) as hosts, closing(Team([], hosts=hosts)) as team:
        wait_until(lambda: served[0].processes.get(0), LIMIT_S, "a follower")
        os.kill(served[0].processes[0], signal.SIGKILL)
        with pytest.raises(FollowerError, match=rf"on {hosts.addresses[0]}\) closed its link"):
            team.together(lambda: None, "idle")


def test_a_rank_ends_with_its_trainer_even_if_it_is_stopped(folder: Path) -> None:
    """The host does not wait for it to notice."""
    with other_host(folder, ODD, served := []) as hosts, closing(Team([], hosts=hosts)):
        wait_until(lambda: served[0].processes.get(0), LIMIT_S, "a follower")
        process = served[0].processes[0]
        os.kill(process, signal.SIGSTOP)
    wait_until(lambda: not served[0].processes, LIMIT_S, "its end")
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize(
    ("ordinal", "told"),
    [
        (0, r"names '203\.0\.113\.1:29400', on which this host cannot listen: .*assign"),
        (1, r"--ordinal is 1, but trainer\.hosts has 1, counted from 0"),
    ],
)
def test_a_host_serves_its_own_address_alone(folder: Path, ordinal: int, told: str) -> None:
    """What is another's, or nobody's, is an operator's matter."""
    config = RunConfig(
        trainer=TrainerSection(ranks=2, hosts=("203.0.113.1:29400",)),
        weights=WeightsSection(secret="of both hosts"),
        model=ModelSection(path=str(folder)),
    )
    with pytest.raises(ConfigError, match=told):
        make_rank_server(config, ordinal, "test")
