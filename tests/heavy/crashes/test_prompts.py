"""The role `prompts` dies anywhere, and what is in the topic at the end is the same."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from rlstreams.schemas.events import ClosedGroups
from rlstreams.streams.log import crash_points
from rlstreams.streams.log.crash_points import CrashPoint, Hook
from rlstreams.streams.log.errors import OutcomeUnknownError
from rlstreams.streams.log.topics import DEAD_LETTERS
from tests.factories import dropped_group, groups_dropped, replacement_requested
from tests.memory.log import Fault
from tests.unit.prompts.world import World, started, step, ticks
from tests.unit.workers.crashing import Killed, kill_at

POINTS = [
    CrashPoint.POLL_BEFORE,
    CrashPoint.POLL_AFTER,
    CrashPoint.BEGIN_BEFORE,
    CrashPoint.BEGIN_AFTER,
    CrashPoint.SEND_AFTER,
    CrashPoint.COMMIT_BEFORE,
    CrashPoint.COMMIT_AFTER,
]


class Life:
    """The role over any number of processes; a script tells it what the trainer does."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder)
        self.num_deaths = 0
        self.hook: Hook | None = None  # armed while the role is at work
        self._worker = self.world.worker()

    def go(self) -> None:
        """All ticks that the state calls for, in as many processes as it takes."""
        crash_points.arm(self.hook)
        quiet = 0
        while quiet < 2:
            before = len(self.world.issued())
            try:
                ticks(self._worker, 1)
                quiet = quiet + 1 if len(self.world.issued()) == before else 0
            except (Killed, OutcomeUnknownError):
                self._restart()
                quiet = 0
        crash_points.arm(None)

    def _restart(self) -> None:
        self.num_deaths += 1
        try:
            self._worker = self.world.worker()
        except (Killed, OutcomeUnknownError):
            self._restart()

    def run(self) -> None:
        """A claim, a step, two drops of which one must be asked for, the steps to the end."""
        world = self.world
        world.says(started(step_target=3))
        self.go()
        world.says(step(1, watermark=3))
        self.go()
        drops = (dropped_group("4", row=1), dropped_group("5", row=2, permanent=True))
        world.says(replacement_requested(group_id="5"), topic=DEAD_LETTERS)
        world.says(groups_dropped(groups=drops, closed=ClosedGroups(watermark=3, above=(4, 5))))
        self.go()
        world.says(step(2, watermark=8))
        self.go()
        world.says(step(3, watermark=11))
        self.go()

    def check(self) -> None:
        """Each sample and evaluation once, numbers dense, each drop answered once."""
        groups = self.world.groups()
        assert [str(number) for number in range(11)] == sorted(groups, key=int)
        samples = Counter((p.group_id, p.sample) for p in chain(*groups.values()))
        assert {(str(n), s): 1 for n in range(11) for s in range(2)} == samples
        fresh = [g[0].row for g in groups.values() if not g[0].replaces]
        assert len(set(fresh)) == len(fresh) == 9
        assert ["4", "5"] == sorted(g[0].replaces for g in groups.values() if g[0].replaces)
        wanted = sorted(f"e{version}-{row}" for version in (0, 3) for row in range(3))
        assert wanted == self.world.evaluations()


@pytest.mark.parametrize("point", POINTS)
def test_a_death_at_any_moment_changes_nothing(tmp_path: Path, point: CrashPoint) -> None:
    """At every time that each point is reached, until the run is over before it dies."""
    for times in range(1, 100):
        life = Life(tmp_path)
        life.hook = kill_at(point, times)
        life.run()
        life.check()
        if life.num_deaths == 0:
            break
    assert times > 5


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.AFTER])
def test_a_failure_of_any_commit_changes_nothing(tmp_path: Path, fault: Fault) -> None:
    """Aborted: sent again. Done, but the answer is lost: the next process finds it done."""
    for times in range(1, 100):
        life = Life(tmp_path)
        begun: list[CrashPoint] = []

        def hook(
            point: CrashPoint,
            life: Life = life,
            begun: list[CrashPoint] = begun,
            times: int = times,
        ) -> None:
            if point == CrashPoint.BEGIN_BEFORE:
                begun.append(point)
                if len(begun) == times:
                    life.world.log.fail_next_commit("run.prompts.0", fault)

        life.hook = hook
        life.run()
        life.check()
        if len(begun) < times:
            break
    assert times > 5
