"""What the loop of `up` makes of what it sees: the phases of a run, and the ages of processes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from rlstreams.streams.log.topics import STEPS
from rlstreams.streams.run.run_lock import FolderGoneError
from rlstreams.up.supervisor.fleet import Fleet, FleetPlace
from rlstreams.up.supervisor.run import Supervisor, _info
from rlstreams.workers.config.run import RunConfig, RunSection
from tests.factories import step_completed, trainer_started
from tests.processes.supervisor.small import OBEDIENT, Log, Scripts, fleet_of
from tests.unit.supervisor.test_watcher import make_bus, say, watching

if TYPE_CHECKING:
    from rlstreams.up.supervisor.broker import BrokerKeeper


def test_a_folder_that_was_deleted_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    """Before anything is started again in a folder that only looks like it."""
    config = RunConfig(run=RunSection(id="x", dir=str(tmp_path / "x")))
    there = [True, True, False]
    fleet = Fleet(Scripts({"trainer": OBEDIENT}), tmp_path, {"trainer": 1}, progress=Log(), say=str)
    with watching(make_bus()) as watcher, closing(fleet):
        supervisor = Supervisor(
            config, fleet, watcher, broker=None, asked=(), is_there=lambda: there.pop(0)
        )
        with pytest.raises(FolderGoneError, match=r"run.dir: .*/x was deleted or moved away"):
            supervisor.run()
    assert [] == there


def test_the_last_checkpoint_has_a_name(tmp_path: Path) -> None:
    """Roles may end from then on. A target that a resumed run goes beyond is none of ours."""
    bus = make_bus()
    say(bus, STEPS, trainer_started(epoch=1, instance="before", step_target=1), step_completed(1))
    with (
        fleet_of(tmp_path, {"trainer": OBEDIENT}, Log()) as (fleet, spawner, _),
        watching(bus) as watcher,
    ):
        supervisor = Supervisor(RunConfig(), fleet, watcher, broker=None, asked=())
        watcher.phase = "running"
        phases = []
        (ours,) = spawner.started
        for step, target in ((1, 1), (2, 3), (3, 3)):
            if step > 1:
                claim = trainer_started(epoch=2, instance=ours.instance, step_target=target)
                say(bus, STEPS, claim, step_completed(step, epoch=2, instance=ours.instance))
            watcher.catch_up()
            supervisor._advance()
            phases.append(watcher.phase)
        assert ["running", "running", "saving"] == phases
        assert "" == watcher._message
        supervisor._say_saving_s = 0.0
        supervisor._advance()
        assert "the run waits for its trainer: no trainer worker has ever rep" in watcher._message


def test_a_stage_that_is_not_fed_is_given_a_new_broker_once_a_step(tmp_path: Path) -> None:
    """Then the run is given up; another problem, or a broker that is not ours, at once."""

    class Keeper:
        def __init__(self) -> None:
            self.asked: list[str] = []

        def restart(self, why: str) -> None:
            self.asked.append(why)

    def advanced(times: int, *, is_unfed: bool, keeper: Keeper | None) -> bool:
        bus = make_bus()
        with fleet_of(tmp_path, {}, Log()) as (fleet, _, _), watching(bus) as watcher:
            broker = cast("BrokerKeeper | None", keeper)
            supervisor = Supervisor(RunConfig(), fleet, watcher, broker=broker, asked=())
            for _ in range(times):
                watcher.stall.problem, watcher.stall.is_unfed = "no step", is_unfed
                supervisor._advance()
            return fleet.failure is not None

    keeper = Keeper()
    assert not advanced(1, is_unfed=True, keeper=keeper)
    assert ["no step"] == keeper.asked
    assert advanced(2, is_unfed=True, keeper=keeper)
    assert advanced(1, is_unfed=False, keeper=keeper)
    assert 2 == len(keeper.asked)
    assert advanced(1, is_unfed=True, keeper=None)


def test_what_the_run_does_between_two_deaths_of_its_broker_is_headway(tmp_path: Path) -> None:
    """A step, not a role's report of itself; said of a broker that serves."""

    class Keeper:
        is_away = lacks_room = False
        headway = 0

        def tick(self) -> None:
            pass

        def made_headway(self) -> None:
            self.headway += 1

    bus, keeper = make_bus(), Keeper()
    with fleet_of(tmp_path, {}, Log()) as (fleet, _, _), watching(bus) as watcher:
        broker = cast("BrokerKeeper", keeper)
        supervisor = Supervisor(RunConfig(), fleet, watcher, broker=broker, asked=())
        say(bus, STEPS, trainer_started(epoch=1, instance="ours", step_target=3))
        supervisor._poll()
        assert 0 == keeper.headway
        for step in (1, 2):
            say(bus, STEPS, step_completed(step, instance="ours"))
            supervisor._poll()
            assert step == keeper.headway


def test_a_process_that_is_about_to_be_started_has_no_age(tmp_path: Path) -> None:
    """Nor is it gone, as one is that ended for good."""
    worker = FleetPlace("logprob", 0, tmp_path / "log")
    assert ("", None) == (_info(worker).instance, _info(worker).started_s)
    worker.restart_at_s = 0.0
    assert _info(worker).started_s is not None
    with fleet_of(tmp_path, {"logprob": OBEDIENT}, Log()) as (fleet, spawner, _):
        told, (spec,) = _info(fleet.workers[0]), spawner.started
        assert (spec.instance, True) == (told.instance, told.started_s is not None)
