"""A fleet of small, real processes, for tests of those who start, watch and break it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlstreams.streams.log.text import tail
from rlstreams.streams.process.child import Orphaned
from rlstreams.streams.views.folds import Folds
from rlstreams.up.supervisor.fleet import Fleet
from rlstreams.up.supervisor.progress import Progress
from rlstreams.up.supervisor.spawner import WorkerChild, WorkerSpec

OBEDIENT = """
import signal, sys, time
def leave(number, frame):
    print(time.monotonic_ns(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
time.sleep(3600)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"  # noqa: E501

DEADLINE_S = 120.0


class Scripts:
    """A `Spawner` of one-file processes, by role."""

    def __init__(self, scripts: Mapping[str, str]) -> None:
        self.scripts = dict(scripts)
        self.started: list[WorkerSpec] = []

    def spawn(self, spec: WorkerSpec) -> WorkerChild:
        self.started.append(spec)
        command = [sys.executable, "-S", "-c", self.scripts[spec.role]]
        child = WorkerChild.started(command, orphaned=Orphaned.DRAINS, log=spec.log)
        child.spec = spec
        return child


class Log(Progress):
    """Progress of processes as the test says it."""

    def __init__(
        self, *, has_committed: bool = False, owns: bool = False, at_target: bool = False
    ) -> None:
        super().__init__(Folds())
        self._has_committed = has_committed
        self._owns = owns
        self._at_target = at_target
        self.saves = False
        self.started: set[str] = set()  # instances

    def committed(self, instance: str) -> bool:
        return self._has_committed

    def owns_run(self, instance: str) -> bool:
        return self._owns

    def has_started(self, instance: str) -> bool:
        return instance in self.started

    def is_saving(self, instance: str) -> bool:
        return self.saves

    @property
    def at_target(self) -> bool:
        return self._at_target


@contextmanager
def fleet_of(
    folder: Path, scripts: Mapping[str, str], progress: Progress | None = None
) -> Iterator[tuple[Fleet, Scripts, list[str]]]:
    said: list[str] = []
    spawner = Scripts(scripts)
    counts = dict.fromkeys(scripts, 1)
    fleet = Fleet(spawner, folder, counts, progress=progress or Log(), say=said.append)
    fleet.start()
    try:
        yield fleet, spawner, said
    finally:
        fleet.close()


def until(fleet: Fleet, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        fleet.tick()
        time.sleep(0.002)


def all_up(fleet: Fleet) -> bool:
    return all(tail(worker.log, 12) for worker in fleet.workers)
