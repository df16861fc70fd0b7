"""The two ways to start a worker: forked from a server that has imported torch, or plainly.

Forked on GPUs too; plainly where no fork server exists, or where it began to use CUDA. Both run the
same command, `rlstreams worker`, with the same log, owner pipe and exit statuses.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Protocol

from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.streams.process.fork_server import ForkServer, fork_context

PRELOAD = "rlstreams.workers.bootstrap.preload"
LIGHT_ROLES = frozenset({"prompts", "server"})  # import no torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker to start, and its options."""

    role: str
    ordinal: int
    config: Path  # resolved configuration, JSON
    log: Path
    instance: str
    reaped: Sequence[str] = ()  # instances of this worker that were seen to end, newest last
    claims_after: int = 0  # the newest epoch when this supervisor began
    server_urls: Sequence[str] = ()  # of all model servers that `up` starts
    crash_at: str = ""  # see `rlstreams.streams.log.crash_points.arm_from`

    @property
    def worker(self) -> str:
        """`{role}-{ordinal}`."""
        return f"{self.role}-{self.ordinal}"

    @property
    def command(self) -> list[str]:
        """Command that starts it, as a child that drains when `up` is gone."""
        words = ["-m", "rlstreams", "worker", self.role, str(self.config)]
        words += ["--ordinal", str(self.ordinal), "--instance", self.instance, "--owner", "up"]
        words += ["--claims-after", str(self.claims_after)]
        words += ["--reaped", ",".join(self.reaped)] if self.reaped else []
        words += ["--server-urls", ",".join(self.server_urls)] if self.server_urls else []
        words += ["--crash-at", self.crash_at] if self.crash_at else []
        return [sys.executable, *words]


class WorkerChild(Child):
    """A started worker."""

    spec: WorkerSpec


class Spawner(Protocol):
    """Starts workers."""

    def spawn(self, spec: WorkerSpec) -> WorkerChild:
        """Start one; returns at once."""


class PlainSpawner:
    """Starts `python -m rlstreams worker ...`."""

    def spawn(self, spec: WorkerSpec) -> WorkerChild:
        """See `Spawner`."""
        child = WorkerChild.started(spec.command, orphaned=Orphaned.DRAINS, log=spec.log)
        child.spec = spec
        return child


class ForkSpawner:
    """Forks the roles that compute. Make it early: it imports torch beside us."""

    def __init__(self, context: ForkServerContext, preload: str = PRELOAD) -> None:
        self._server = ForkServer(context, [__name__, preload])

    def spawn(self, spec: WorkerSpec) -> WorkerChild:
        """See `Spawner`."""
        if spec.role in LIGHT_ROLES:  # it would carry, and wait for, imports that it never uses
            return PlainSpawner().spawn(spec)
        child = self._server.started(WorkerChild, _work, spec.command, log=spec.log)
        child.spec = spec
        return child


def make_spawner() -> Spawner:
    """Make a spawner: one that forks, where the platform can."""
    context = fork_context()
    return PlainSpawner() if context is None else ForkSpawner(context)


def _work(command: Sequence[str]) -> int:
    """Run `python -m rlstreams worker ...` in this fork; return its exit status."""
    if getattr(sys.modules.get(PRELOAD), "BEGAN_CUDA", False):
        os.execv(command[0], list(command))
    _, _, module, *sys.argv[1:] = command
    sys.modules.pop(f"{module}.__main__", None)  # of the console script: runpy warns of it
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as err:
        return int(err.code or 0)
    return 0
