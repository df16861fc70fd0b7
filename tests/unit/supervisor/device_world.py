"""Roles that share a device of one place, the fleet that starts them again, and their scheduler."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from rlstreams.schemas.events import DeviceLease
from rlstreams.streams.log.codec import SteadyClock, decoded
from rlstreams.streams.log.topics import CONTROL, PROMPTS, SCORED, TRAJECTORIES
from rlstreams.streams.workers import Workers
from rlstreams.up.supervisor import device_scheduler
from rlstreams.workers.config.operation import Device
from rlstreams.workers.config.reward import JudgeSection
from rlstreams.workers.config.run import PromptsSection, RunConfig, RunSection
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.loop import lease
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.control import ControlFollower, ControlledRole
from tests.factories import worker_report
from tests.logs import made_log
from tests.memory.bus import MemoryBus

ROLES = ("trainer", "logprob", "rollout")
NOTHING: Mapping[str, float] = MappingProxyType({})
JUDGE = "server"  # the role of the judge's process
STEP = 4  # samples


@dataclass
class Card:
    """Memory for one role; and what waits, sample by sample, through the stages."""

    held: set[str] = field(default_factory=set)  # instances
    unsampled: int = 4 * STEP
    unjudged: int = 0  # where a judge has shifts
    unscored: int = 0
    scored: int = 0
    steps: int = 0
    has_judge: bool = False

    def take(self, instance: str) -> None:
        assert not self.held - {instance}, f"{instance} loads beside {self.held}"
        self.held.add(instance)

    def work(self, role: str, instance: str) -> None:
        assert self.held == {instance}, f"{role} works without its memory"
        if role == "rollout" and self.unsampled:
            self.unsampled -= 1
            self.unjudged, self.unscored = (
                self.unjudged + self.has_judge, self.unscored + (not self.has_judge)
            )  # fmt: skip
        elif role == JUDGE and self.unjudged:
            self.unjudged, self.unscored = self.unjudged - 1, self.unscored + 1
        elif role == "logprob" and self.unscored:
            self.unscored, self.scored = self.unscored - 1, self.scored + 1
        elif role == "trainer" and self.scored >= STEP:
            self.scored, self.unsampled = self.scored - STEP, self.unsampled + STEP
            self.steps += 1


class FakeRole:
    """Loads and off-loads in some ticks; works whenever it may."""

    def __init__(self, card: Card, role: str, instance: str) -> None:
        self.is_paused, self.done, self.hangs = False, False, False
        self._card, self._role, self._instance = card, role, instance
        self._ticks_left = 0
        card.take(instance)

    def give_up_device(self) -> bool:
        return self._change() and not self._card.held.discard(self._instance)

    def take_device(self) -> bool:
        return self._change() and not self._card.take(self._instance)

    def _change(self) -> bool:
        if self.hangs:
            return False
        self._ticks_left = self._ticks_left - 1 if self._ticks_left else 2
        return not self._ticks_left

    def tick(self) -> None:
        if not self.is_paused:
            self._card.work(self._role, self._instance)

    def drain(self) -> None:
        self.done = True

    def close(self) -> None:
        pass


class World:
    """Processes, the fleet that starts them again, and the scheduler."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        change_s: float,
        *,
        has_judge: bool = False,
    ) -> None:
        self.roles = (*ROLES, JUDGE) if has_judge else ROLES
        shared = (*ROLES, "judge") if has_judge else ROLES
        device = Device(name="card", roles=shared, turn_s=0.0, change_s=change_s)
        self.config = RunConfig(
            judge=JudgeSection(model="a-model" if has_judge else ""),
            run=RunSection(id="demo", dir=str(folder)),
            prompts=PromptsSection(group_size=2),
            trainer=TrainerSection(groups_per_step=STEP // 2),
            devices=(device,),
        )
        self.bus, self.card = MemoryBus(made_log("demo", 1), "demo"), Card(has_judge=has_judge)
        self.locks: dict[str, list[int]] = {}  # by instance, as long as it lives
        self.starting = ""
        self.clock = SteadyClock()
        take = lease.take

        def remember(path: Path) -> int:
            self.locks.setdefault(self.starting, []).append(fd := take(path))
            return fd

        monkeypatch.setattr(lease, "take", remember)
        monkeypatch.setattr(device_scheduler, "AGAIN_S", 0.02)
        self.workers, self.said, self.number = Workers(), list[str](), 0
        self._reader = self.bus.reader(self.bus.beginnings(CONTROL.name))
        self.crew = {role: SimpleNamespace(child=None) for role in self.roles}
        self.replaced: list[Any] = []
        for role in self.roles:
            self.start(role)
        self.begin()

    def begin(self) -> None:
        """A new `up`: another scheduler, which knows the log alone."""
        self.scheduler = device_scheduler.DeviceScheduler(self.config, self, self, self.bus)  # type: ignore[arg-type]

    def start(self, role: str) -> None:
        self.number += 1
        instance, control = f"{role}/{self.number}", ControlFollower(self.bus, 0.0)
        context = Context(config=self.config, bus=self.bus, role=role, ordinal=0, instance=instance)
        shifts = lease.DeviceShifts(context, self.config.devices[0], control.leases)
        spec = SimpleNamespace(instance=instance, worker=f"{role}-0")
        process = SimpleNamespace(spec=spec, status=None, role=None, control=control, shifts=shifts)
        process.poll = lambda: process.status
        process.signal = lambda number: self.kill(process, number)
        self.crew[role].child = process

    def kill(self, process: Any, number: int = signal.SIGKILL) -> None:
        process.status = -number
        self.card.held.discard(process.spec.instance)
        for fd in self.locks.pop(process.spec.instance, ()):
            os.close(fd)

    def tick(self) -> None:
        """One of everybody, and one of `up`."""
        for role, worker in self.crew.items():
            if worker.child.status is not None:
                self.start(role)
            self.live(role, worker.child)
        for process in self.replaced:
            self.live(process.spec.worker.partition("-")[0], process)
        self.workers.passes(self.clock())
        if self.card.has_judge:
            self._report("rollout", "working" if self.card.unsampled else "waiting")
            asked = {"requests": 7.0 + self.card.unjudged, "answers": 7.0}
            self._report(JUDGE, "serving" if self.card.unjudged else "waiting", asked)
        for raw in self._reader.poll(100, 0.0):
            self.workers.apply(decoded(raw).event)
        self.scheduler.tick()

    def _report(self, role: str, state: str, counters: Mapping[str, float] = NOTHING) -> None:
        instance, at_ms = self.crew[role].child.spec.instance, self.clock()
        self.workers.apply(worker_report(
            worker=f"{role}-0", role=role, instance=instance, state=state, counters=dict(counters),
            at_ms=at_ms,
        ))  # fmt: skip

    def live(self, role: str, process: Any) -> None:
        if process.status is not None:
            return
        if process.role is None:
            looks = iter([True, False])
            self.starting = process.spec.instance
            if process.shifts.await_first(lambda: bool(process.control.poll()) and next(looks)):
                fake = FakeRole(self.card, role, process.spec.instance)
                process.role = ControlledRole(fake, fake, process.control, process.shifts)
            return
        process.role.tick()

    def until(self, reached: Any, limit_s: float = 60.0) -> None:
        until_s = time.monotonic() + limit_s
        while not reached():
            assert time.monotonic() < until_s, (self.card, self.workers.leases["card"])
            self.tick()

    # What the scheduler asks of fleet and watcher.

    def of(self, role: str) -> list[Any]:
        return [self.crew[role]]

    def child_of(self, instance: str) -> Any:
        living = [*(w.child for w in self.crew.values()), *self.replaced]
        found = (p for p in living if p.spec.instance == instance and p.status is None)
        return next(found, None)

    @property
    def waiting(self) -> dict[str, int]:
        card = self.card
        counts = {
            PROMPTS: card.unsampled + card.unjudged,
            TRAJECTORIES: card.unscored,
            SCORED: card.scored,
        }
        return {topic.name: count for topic, count in counts.items()}

    control, progress = "running", SimpleNamespace(at_target=False)

    @property
    def ledger(self) -> SimpleNamespace:
        return SimpleNamespace(policy_version=self.card.steps)

    def say(self, text: str) -> None:
        self.said.append(text)

    give_up = say


def events(world: World) -> list[DeviceLease]:
    reader = world.bus.reader(world.bus.beginnings(CONTROL.name))
    found = [decoded(raw).event for raw in reader.poll(100_000, 0.0)]
    return [event for event in found if isinstance(event, DeviceLease)]
