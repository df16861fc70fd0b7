"""What the loop of `up` makes of what it sees: the phases of a run, and the ages of processes."""

from __future__ import annotations

from pathlib import Path

from rlstreams.streams.log.topics import STEPS
from rlstreams.up.supervisor.fleet import Worker
from rlstreams.up.supervisor.run import Interrupts, Supervisor, _info
from rlstreams.workers.config.run import RunConfig
from tests.factories import step_completed, trainer_started
from tests.processes.supervisor.small import OBEDIENT, Log, fleet_of
from tests.unit.supervisor.test_watcher import make_bus, say, watching


def test_the_last_checkpoint_has_a_name(tmp_path: Path) -> None:
    """Roles may end from then on. A target that a resumed run goes beyond is none of ours."""
    bus = make_bus()
    say(bus, STEPS, trainer_started(epoch=1, instance="before", step_target=1), step_completed(1))
    with (
        fleet_of(tmp_path, {"trainer": OBEDIENT}, Log()) as (fleet, spawner, _),
        watching(bus) as watcher,
    ):
        supervisor = Supervisor(RunConfig(), fleet, watcher, broker=None, interrupts=Interrupts())
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


def test_a_process_that_is_about_to_be_started_has_no_age(tmp_path: Path) -> None:
    """Nor is it gone, as one is that ended for good."""
    worker = Worker("logprob", 0, tmp_path / "log")
    assert ("", None) == (_info(worker).instance, _info(worker).started_s)
    worker.restart_at_s = 0.0
    assert _info(worker).started_s is not None
    with fleet_of(tmp_path, {"logprob": OBEDIENT}, Log()) as (fleet, spawner, _):
        told, (spec,) = _info(fleet.workers[0]), spawner.started
        assert (spec.instance, True) == (told.instance, told.started_s is not None)
