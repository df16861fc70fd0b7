"""A live run is scaled: workers are added, told to leave, and none of it ends the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.streams.log.text import tail
from rlstreams.up.supervisor.fleet import Fleet
from rlstreams.up.supervisor.scale import Scale, partitions_of, problem
from rlstreams.workers.config.operation import Device
from rlstreams.workers.config.run import RolloutSection, RunConfig
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.processes.supervisor.small import DEAF, OBEDIENT, all_up, fleet_of, until

CONFIG = RunConfig()
BUS = MemoryBus(made_log("run", 8), "run")


def scale_of(fleet: Fleet, said: list[str], taken: tuple[str, ...] = ()) -> Scale:
    return Scale(CONFIG, fleet, BUS, is_taken=lambda name: name in taken, say=said.append)


def names(fleet: Fleet, role: str = "rollout") -> list[str]:
    return [worker.name for worker in fleet.of(role)]


def test_one_to_four_to_two(tmp_path: Path) -> None:
    """In the order of drains; who leaves finishes, is not started again, and its number is free."""
    scripts = {"rollout": OBEDIENT, "trainer": OBEDIENT}
    with fleet_of(tmp_path, scripts) as (fleet, spawner, said):
        scale = scale_of(fleet, said, taken=("rollout-1",))
        until(fleet, lambda: all_up(fleet))
        for _ in range(3):
            scale.tick({"rollout": 4})
        assert ["rollout-0", "rollout-2", "rollout-3", "rollout-4"] == names(fleet)
        assert [w.role for w in fleet.workers] == ["rollout"] * 4 + ["trainer"]
        until(fleet, lambda: all_up(fleet))
        assert fleet.kill(fleet.of("rollout")[2])
        until(fleet, lambda: len(tail(fleet.of("rollout")[2].log, 12)) == 2)
        scale.tick({"rollout": 2})
        until(fleet, lambda: len(fleet.of("rollout")) == 2)
        assert ["rollout-0", "rollout-2"] == names(fleet)
        assert 6 == len(spawner.started)
        scale.tick({"rollout": 3})
        assert ["rollout-0", "rollout-2", "rollout-3"] == names(fleet)
        assert [line for line in said if "scaled" in line] == [
            "rollout is scaled to 4: comes rollout-2, rollout-3, rollout-4",
            "rollout is scaled to 2: leaves rollout-3, rollout-4",
            "rollout is scaled to 3: comes rollout-3",
        ]
        assert {line for line in said if "left" in line} == {
            "rollout-3 has left: is done", "rollout-4 has left: is done"
        }  # fmt: skip
        assert fleet.failure is None


def test_who_does_not_drain_in_time_is_killed(tmp_path: Path) -> None:
    with fleet_of(tmp_path, {"logprob": DEAF}) as (fleet, _, said):
        worker = fleet.add("logprob", 1)
        until(fleet, lambda: all_up(fleet))
        fleet.retire(worker, 0.05)
        until(fleet, lambda: len(fleet.of("logprob")) == 1)
        assert ["logprob-1 did not drain in time: killed",
                "logprob-1 has left: was ended by SIGKILL"] == said  # fmt: skip


def test_one_that_cannot_work_does_not_end_the_run(tmp_path: Path) -> None:
    """No device for it, for instance: the run was fine without it."""
    with fleet_of(tmp_path, {"rollout": OBEDIENT}) as (fleet, spawner, said):
        until(fleet, lambda: all_up(fleet))
        spawner.scripts["rollout"] = "print('no such device'); raise SystemExit(78)"
        scale_of(fleet, said).tick({"rollout": 2})
        until(fleet, lambda: len(fleet.of("rollout")) == 1)
        assert fleet.failure is None
        assert "rollout-1 refused its configuration" in said[-1]
        assert said[-1].endswith("; the run goes on without it")


def test_what_cannot_be_is_told_and_changes_nothing(tmp_path: Path) -> None:
    """Once for each time that it is asked for."""
    with fleet_of(tmp_path, {"rollout": OBEDIENT}) as (fleet, spawner, said):
        scale = scale_of(fleet, said)
        for _ in range(3):
            scale.tick({"rollout": 9, "trainer": 2})
        assert 1 == len(spawner.started)
        assert 2 == len(said)
        assert "not scaled: rollout=9: prompts has 8 partitions" in said[0]
        assert "not scaled: trainer=2: rollout and logprob are scaled" in said[1]


@pytest.mark.parametrize(
    ("config", "number", "told"),
    [
        (CONFIG, 8, ""),
        (CONFIG, 0, "a run needs one rollout worker"),
        (replace(CONFIG, rollout=RolloutSection(engine="vllm")), 2, "rollout.engine is 'vllm'"),
        (replace(CONFIG, devices=(Device(name="gpu", roles=("rollout", "trainer")),)), 2,
         "rollout shares device 'gpu'"),
    ],
)  # fmt: skip
def test_a_reason_for_each(config: RunConfig, number: int, told: str) -> None:
    found = problem(config, "rollout", number, partitions_of(BUS))
    assert found.startswith(f"rollout={number}: {told}") if told else "" == found
