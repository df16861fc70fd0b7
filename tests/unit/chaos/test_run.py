"""What can be struck, and how a worker is told where to die."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlstreams.streams.log import crash_points
from rlstreams.streams.log.errors import ConfigError
from rlstreams.up.supervisor.fault_hook import UpOptions
from rlstreams.workers.bootstrap.parts import arm_crash_point, await_broker
from rlstreams.workers.config.run import (
    BrokerSection,
    EngineSection,
    LogprobSection,
    RolloutSection,
    RunConfig,
    RunSection,
)
from tests.chaos.plan import ChaosOptions
from tests.chaos.run import chaos, victims

OURS = RunConfig(rollout=RolloutSection(workers=2), logprob=LogprobSection(workers=3))
THEIRS = RunConfig(broker=BrokerSection(bootstrap="127.0.0.1:9"))


def test_all_can_be_struck_but_a_broker_that_is_not_ours() -> None:
    """With as many workers as the run has."""
    counts = {"prompts": 1, "rollout": 2, "logprob": 3, "trainer": 1}
    assert counts | {"broker": 1, "records": 1} == victims(OURS, [])
    assert {"logprob": 3, "broker": 1} == victims(OURS, ["logprob", "broker"])
    assert "broker" not in victims(THEIRS, [])


def test_model_servers_can_be_struck_where_the_workers_start_them() -> None:
    """One for each rollout worker; not those of somebody else."""
    rollout = RolloutSection(workers=2, engine="vllm")
    assert {"server": 2} == victims(RunConfig(rollout=rollout), ["server"])
    theirs = RunConfig(rollout=rollout, engine=EngineSection(urls=("http://a:1", "http://b:1")))
    assert "server" not in victims(theirs, [])
    with pytest.raises(ConfigError, match=r"the server, but those of engine\.urls are not ours"):
        victims(theirs, ["server"])
    with pytest.raises(ConfigError, match="samples in the worker's process: strike rollout"):
        victims(OURS, ["server"])


def test_a_victim_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'learner'; there are: rollout, logprob"):
        victims(OURS, ["learner"])
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 is not ours: leave it out"):
        victims(THEIRS, ["broker"])


def test_a_worker_is_armed_by_argument_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument wins; nothing given arms nothing; nonsense is refused with what there is."""
    monkeypatch.delenv(crash_points.VARIABLE, raising=False)
    arm_crash_point("")
    monkeypatch.setenv(crash_points.VARIABLE, "lunch")
    with pytest.raises(ConfigError, match=r"'lunch'; points: poll\.before"):
        arm_crash_point("")
    try:
        arm_crash_point("send.after:3")
    finally:
        crash_points.arm(None)


def test_a_worker_waits_for_its_broker_a_while(tmp_path: object) -> None:
    """One that is named is not waited for; one that does not come is, up to the limit."""
    await_broker(THEIRS, 3600.0)
    started_s = time.monotonic()
    await_broker(RunConfig(run=RunSection(dir=f"{tmp_path}/run")), 0.05)
    assert time.monotonic() - started_s >= 0.05


def test_a_file_for_the_figures_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """Before the run, after which they would be lost."""
    options = UpOptions(config=OURS, command="up", is_resumed=False, is_live=False)
    with pytest.raises(ConfigError, match=r"--json .*/no/x\.json: .*/no is no folder that can be"):
        chaos(options, ChaosOptions(num_faults=1, json_file=str(tmp_path / "no" / "x.json")))
