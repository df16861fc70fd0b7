"""After the last step: the run waits for its trainer, whatever the other roles do."""

from __future__ import annotations

from pathlib import Path

from streams.topics import STEPS
from tests.factories import step_completed, trainer_started
from tests.unit.supervisor.small import OBEDIENT, Log, fleet_of
from tests.unit.supervisor.test_watcher import make_bus, say, watching
from workers.config.run import RunConfig
from workers.supervisor.interrupts import Interrupts
from workers.supervisor.keyboard import Keyboard
from workers.supervisor.run import Supervisor


def test_the_last_checkpoint_has_a_name(tmp_path: Path) -> None:
    """Roles may end from then on. A target that a resumed run goes beyond is none of ours."""
    bus = make_bus()
    say(bus, STEPS, trainer_started(epoch=1, instance="before", step_target=1), step_completed(1))
    with (
        fleet_of(tmp_path, {"trainer": OBEDIENT}, Log()) as (fleet, spawner, _),
        watching(bus) as watcher,
    ):
        supervisor = Supervisor(
            RunConfig(), fleet, watcher, broker=None, keyboard=Keyboard(), interrupts=Interrupts()
        )
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
