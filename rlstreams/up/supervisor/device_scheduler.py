"""Scheduler of shared devices: grants and recalls leases; a lease whose holder ended is lost.

Its state is the log: it writes one event, and decides again once it has read it back. A holder that
does not answer within `devices.change_s` is killed, and named. A lease is free only when its
process is known to have given its memory up, or to have ended; so is a model server's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from rlstreams.schemas.events import DeviceLease
from rlstreams.streams.leases import GRANTED, HELD, LOST, RECALLED, Lease
from rlstreams.streams.log.bus import Bus, Closing, Producer
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.owner_lock import OwnedError, take
from rlstreams.streams.log.topics import CONTROL, PROMPTS, SCORED, TRAJECTORIES
from rlstreams.up.supervisor.fleet import GRACE_S, Fleet, FleetPlace
from rlstreams.up.supervisor.shifts import Demand, next_role, why_recall
from rlstreams.up.supervisor.spawner import WorkerChild
from rlstreams.up.supervisor.watcher import Watcher
from rlstreams.workers.config.operation import Device
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.control import PAUSED
from rlstreams.workers.loop.lease import lock_file

IDLE_S = 2.0  # a holder that reports for so long that it waits has nothing to do
AGAIN_S = 10.0  # before a role that had nothing to do is granted a lease for the same samples
SERVER_S = 30.0  # for a model server to sleep or to end, once the lease is over
READ_BACK_S = 10.0  # for an event of ours to be read; then it is decided again from the log


class DeviceScheduler(Closing):
    """All shared devices of a run; `tick` often; it waits only for the commit of a change."""

    def __init__(self, config: RunConfig, fleet: Fleet, watcher: Watcher, bus: Bus) -> None:
        self._config = config
        self._judge = f"server-{config.num_started}"
        self._fleet = fleet
        self._watcher = watcher
        self._bus = bus
        self._producer: Producer | None = None
        self._written: dict[str, tuple[int, str, float]] = {}  # by device: lease, state, when
        self._idle: dict[str, tuple[int, int, float]] = {}  # by role: samples, version, when
        self._killed: set[str] = set()  # instances
        self._since_s: dict[str, float] = {}  # when the wait for a process began, by process id

    def tick(self, *, is_draining: bool = False) -> None:
        """Advance every device by at most one event; kill a replaced worker that shares one."""
        for child in self._fleet.replaced:
            role = self._role_of(child.spec.worker)
            if (device := self._config.shared_device(role)) is not None:
                why = f"{child.spec.worker} was replaced, and shares device {device.name!r}"
                self._kill(child, why)
        for device in self._config.devices:
            lease = self._watcher.workers.leases[device.name]
            if self._has_read(device, lease) and (
                event := self._next(device, lease, is_draining=is_draining)
            ):
                self._write(event)
                return

    def close(self) -> None:
        """Release the producer; another is made when it is needed."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def _next(self, device: Device, lease: Lease, *, is_draining: bool) -> DeviceLease | None:
        demands = self._demands(device, lease, is_draining=is_draining)
        if lease.is_free:
            return self._grant(device, lease, demands)
        role = self._role_of(lease.holder)
        held_s = (self._watcher.workers.clock_ms - lease.since_ms) / 1000
        child = self._fleet.child_of(lease.instance)
        if child is None:
            if self._is_there(device, lease):
                return None  # of an `up` that was killed: its workers drain
            return self._event(device, lease, LOST, f"{lease.holder} ended", seconds=held_s)
        if lease.state == HELD:
            return self._recall(device, lease, role, held_s, demands)
        has_begun = lease.instance in lease.begun  # a start has limits of its own
        if held_s > device.change_s and (has_begun or lease.state == RECALLED):
            what = "take" if lease.state == GRANTED else "give up"
            self._kill(
                child,
                f"{lease.holder} did not {what} device {device.name!r} within {held_s:.0f} s "
                f"(devices.change_s is {device.change_s:g})",
            )
        return None

    def _grant(
        self, device: Device, lease: Lease, demands: Mapping[str, Demand]
    ) -> DeviceLease | None:
        role = "" if self._has_server(device, lease) else next_role(demands)
        if not role:
            return None
        child = self._worker(role).child
        assert child is not None, "who asks has a process"
        taken = Lease(shift=lease.shift + 1, holder=child.spec.worker, instance=child.spec.instance)
        return self._event(device, taken, GRANTED, f"{role} waits for {demands[role]}", demands)

    def _recall(
        self, device: Device, lease: Lease, role: str, held_s: float, demands: Mapping[str, Demand]
    ) -> DeviceLease | None:
        is_idle = self._is_idle(lease)
        why = why_recall(
            role,
            held_s,
            demands,
            shift_s=device.turn_s,
            longest_shift_s=device.longest_turn_s,
            is_idle=is_idle,
        )
        if not why:
            return None
        if role in demands and is_idle:
            version = self._watcher.ledger.policy_version
            self._idle[role] = (demands[role].samples, version, time.monotonic())
        return self._event(device, lease, RECALLED, why, demands)

    def _event(
        self,
        device: Device,
        lease: Lease,
        state: str,
        reason: str,
        demands: Mapping[str, Demand] | None = None,
        seconds: float = 0.0,
    ) -> DeviceLease:
        return DeviceLease(
            run=self._config.run.id,
            device=device.name,
            turn=lease.shift,
            state=state,
            holder=lease.holder,
            instance=lease.instance,
            reason=reason,
            seconds=seconds,
            waiting={role: float(demand.samples) for role, demand in (demands or {}).items()},
            by="up",
            at_ms=now_ms(),
        )

    def _demands(self, device: Device, lease: Lease, *, is_draining: bool) -> dict[str, Demand]:
        """Demand of each role of the device that has a process; none while the run is paused."""
        if self._watcher.control == PAUSED and not is_draining:
            return {}
        waiting, trainer = self._watcher.waiting, self._config.trainer
        scored = waiting[SCORED.name]
        if scored < trainer.groups_per_step * self._config.prompts.group_size:
            scored = 0
        samples = {
            "rollout": waiting[PROMPTS.name],
            "logprob": waiting[TRAJECTORIES.name],
            "trainer": max(scored, int(is_draining)),  # its checkpoint
        }
        if self._watcher.progress.at_target:  # each has its end: the last version is pulled
            samples = {role: max(1, number) for role, number in samples.items()}
        samples["judge"] = self._num_unjudged()
        found: dict[str, Demand] = {}
        is_busy = False  # a role beside the trainer
        for role in device.roles:
            child = self._worker(role).child
            if child is not None and child.poll() is None:
                is_starting = child.spec.instance not in lease.begun
                demand = Demand(samples=samples[role], is_starting=is_starting)
                holds = lease.is_of(child.spec.instance)
                if is_starting or holds or not self._was_idle(role, samples[role]):
                    found[role] = demand
                    has_work = not self._is_idle(lease) if holds else demand.is_any
                    is_busy |= role != "trainer" and has_work
        if not is_busy and "trainer" in found and not found["trainer"].is_any:
            found["trainer"] = Demand(samples=1)  # the count may be too low: the trainer finds out
        return found

    def _num_unjudged(self) -> int:
        """Requests that the judge was sent, and has not answered, by its newest report."""
        workers, name = self._watcher.workers.by_name, self._judge
        if name not in workers or not workers[name].lives:
            return 0
        counters = workers[name].newest.counters
        return int(counters.get("requests", 0.0) - counters.get("answers", 0.0))

    def _is_idle(self, lease: Lease) -> bool:
        """Whether the holder of the lease has had nothing to do for a while."""
        idle_s = self._watcher.workers.idle_s(lease.instance, lease.held_ms)
        return lease.state == HELD and idle_s >= IDLE_S

    def _was_idle(self, role: str, samples: int) -> bool:
        """Whether `role` had nothing to do a moment ago, when as many samples waited for it."""
        known = self._idle.get(role)
        if known is None or time.monotonic() - known[2] > AGAIN_S:
            return False
        return known[:2] == (samples, self._watcher.ledger.policy_version)

    def _worker(self, role: str) -> FleetPlace:
        """One worker a role, as configuration sees to; the judge's is the last server."""
        return self._fleet.of("server")[-1] if role == "judge" else self._fleet.of(role)[0]

    def _role_of(self, worker: str) -> str:
        """The role by which a worker has shifts; the judge's server has some of its own."""
        is_judge = bool(self._config.judge.model) and worker == self._judge
        return "judge" if is_judge else worker.rpartition("-")[0]

    def _is_there(self, device: Device, lease: Lease) -> bool:
        """Whether a process that is none of ours still holds what it locked with its device."""
        try:
            os.close(take(lock_file(Path(self._config.folder), lease.holder)))
        except OwnedError as err:
            limits = self._config.deadlines
            saves_s = limits.checkpoint_s if lease.holder.startswith("trainer-") else 0.0
            limit_s = limits.drain_s + saves_s + GRACE_S
            self._await(device, f"{lease.holder} of an earlier start", err.owner, limit_s)
            return True
        return False

    def _has_server(self, device: Device, lease: Lease) -> bool:
        """Whether a model server may still have memory there: its role has it sleep, or ends it."""
        names = {
            "rollout": [f"server-{number}" for number in range(self._config.num_servers)],
            "judge": ["judge"],
        }
        for name in names.get(self._role_of(lease.holder), ()):
            try:
                os.close(take(lock_file(Path(self._config.folder), name)))
            except OwnedError as err:
                self._await(device, f"{name}, after its shift,", err.owner, SERVER_S)
                return True
        return False

    def _await(self, device: Device, who: str, pid: str, limit_s: float) -> None:
        """End the run, if a process that is not ours to kill has kept a device for too long."""
        now_s = time.monotonic()
        if now_s > self._since_s.setdefault(pid, now_s) + limit_s:
            self._fleet.give_up(
                f"{who} has kept device {device.name!r} for {limit_s:g} s: end process {pid}, "
                "and go on with --resume"
            )

    def _kill(self, child: WorkerChild, why: str) -> None:
        """Kill a worker, once; its end is reaped as any other."""
        if child.spec.instance not in self._killed:
            self._killed.add(child.spec.instance)
            self._watcher.say(f"{why}: it is killed")
            child.signal(signal.SIGKILL)

    def _write(self, event: DeviceLease) -> None:
        """Write a change of a lease; it is decided anew if its commit fails or may have failed."""
        self._written[event.device] = (event.turn, event.state, time.monotonic())
        try:
            self._producer = self._producer or self._bus.producer("up.lease")
            self._producer.commit([outgoing(CONTROL, event)])
        except StreamsError as err:
            self._watcher.say(f"a change of a device's lease could not be written: {err}")
            self.close()

    def _has_read(self, device: Device, lease: Lease) -> bool:
        """Whether the lease shows what was written last."""
        if device.name not in self._written:
            return True
        shift, state, at_s = self._written[device.name]
        shown = {LOST: lease.is_free, RECALLED: lease.state not in (GRANTED, HELD)}
        is_there = lease.shift > shift or (lease.shift == shift and shown.get(state, True))
        return is_there or time.monotonic() > at_s + READ_BACK_S
