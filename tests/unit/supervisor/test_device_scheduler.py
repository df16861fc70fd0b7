"""Shifts on a shared device: a protocol that kills, hangs and zombies cannot break.

The scheduler of `up` and the processes' own half of the protocol run on the in-memory log. The
device is a budget of memory that holds one role at a time; processes die at any moment.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlstreams.streams.leases import HELD, LOST, RELEASED, Lease
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.log.topics import CONTROL
from rlstreams.up.supervisor import device_scheduler
from rlstreams.workers.config.load import load
from rlstreams.workers.loop import lease
from tests.control_events import device_lease
from tests.factories import worker_report
from tests.unit.roles.stand import EXAMPLE
from tests.unit.supervisor.device_world import ROLES, STEP, World, events


@pytest.mark.parametrize("has_judge", [False, True])
def test_no_kill_ever_gives_a_device_two_holders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_judge: bool
) -> None:
    """40 kills at any moment, some of `up` too: steps are made, each shift has one holder, and
    every one of them ended in the log."""
    monkeypatch.setattr(device_scheduler, "IDLE_S", 0.02)
    world = World(tmp_path, monkeypatch, change_s=60.0, has_judge=has_judge)
    chance = random.Random(1)
    kills: Counter[str] = Counter()
    while kills.total() < 40 or world.card.steps < 20:
        world.until(lambda: chance.random() < 0.05)
        role = chance.choice([*world.roles, "up"])
        if role == "up":
            world.begin()
        elif world.crew[role].child.status is None:
            world.kill(world.crew[role].child)
        kills[role] += 1
    steps = world.card.steps
    world.until(lambda: world.card.steps >= steps + 3)
    assert min(kills.values()) > 3
    grants = [event for event in events(world) if event.state == "granted"]
    assert [event.turn for event in grants] == list(range(1, len(grants) + 1))
    ended = {event.turn for event in events(world) if event.state in (RELEASED, LOST)}
    assert ended >= {event.turn for event in grants[:-1]}
    assert {event.holder for event in events(world) if event.state == HELD} == {
        f"{role}-0" for role in world.roles
    }


def test_who_does_not_give_up_is_killed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder that hangs costs its deadline; the others go on, and so does its successor."""
    world = World(tmp_path, monkeypatch, change_s=1.5)
    world.until(lambda: world.card.steps >= 2)
    hanging = world.crew["rollout"].child
    world.until(lambda: world.card.held == {hanging.spec.instance})
    hanging.role._role.hangs = True
    steps = world.card.steps
    world.until(lambda: world.card.steps >= steps + 3)
    (said,) = world.said
    assert "rollout-0 did not give up device 'card' within" in said
    assert "devices.change_s is 1.5): it is killed" in said


def test_a_holder_that_was_replaced_makes_room_for_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It slept while its successor was started: that one gets the device, once it has ended."""
    world = World(tmp_path, monkeypatch, change_s=60.0)
    world.until(lambda: world.card.steps >= 1)
    asleep = world.crew["trainer"].child
    world.until(lambda: world.card.held == {asleep.spec.instance})
    world.replaced.append(asleep)
    world.start("trainer")
    steps = world.card.steps
    world.until(lambda: world.card.steps >= steps + 2)
    assert asleep.status == -signal.SIGKILL
    assert world.said == ["trainer-0 was replaced, and shares device 'card': it is killed"]


def test_the_workers_of_a_killed_up_keep_the_device_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another `up` grants nothing while a stranger lives: its lock says so, whatever the log."""
    world = World(tmp_path, monkeypatch, change_s=60.0)
    world.until(lambda: world.card.steps >= 1)
    stranger = world.crew["logprob"].child
    world.until(lambda: world.card.held == {stranger.spec.instance})
    shift = world.workers.leases["card"].shift
    for role in ROLES:
        world.start(role)  # in the new one's fleet there are only these
    world.begin()
    for _ in range(20):
        world.tick()
    assert (world.workers.leases["card"].shift, world.card.held) == (
        shift,
        {stranger.spec.instance},
    )
    assert not world.said
    monkeypatch.setattr(device_scheduler, "GRACE_S", -world.config.deadlines.drain_s)
    world.tick()
    assert "logprob-0 of an earlier start has kept device 'card' for 0 s" in world.said[-1]
    assert f"end process {os.getpid()}, and go on" in world.said[-1]
    world.kill(stranger)
    world.until(lambda: world.card.steps >= 3)


def test_a_holder_that_waits_lets_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples may wait for a version that is not there: who says that it waits is recalled, and not
    granted again for the same samples. The trainer is then asked, whatever is counted for it."""
    world = World(tmp_path, monkeypatch, change_s=60.0)
    world.card.unsampled, world.card.scored = 0, STEP
    world.until(lambda: not world.workers.leases["card"].is_free and not world.card.scored)
    monkeypatch.setattr(device_scheduler, "AGAIN_S", 60.0)
    world.until(lambda: world.card.held == {world.crew["rollout"].child.spec.instance})
    monkeypatch.setattr(world.card, "work", lambda *_: None)  # nobody finishes anything
    world.card.unsampled = world.card.unscored = 5
    for role in ROLES:
        instance = world.crew[role].child.spec.instance
        world.workers.apply(worker_report(role=role, instance=instance, state="waiting", at_ms=0))
    monkeypatch.setattr(device_scheduler, "IDLE_S", 0.02)
    shift = world.workers.leases["card"].shift
    world.until(lambda: world.workers.leases["card"].shift == shift + 2)
    until_s = time.monotonic() + 0.3
    while time.monotonic() < until_s:
        world.tick()
    found = [event for event in events(world) if event.turn > shift and event.state == HELD]
    assert [event.holder for event in found] == ["logprob-0", "trainer-0"]


def test_after_the_last_step_each_role_has_the_device_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for rollout or log-prob, but the last version that they are to pull."""
    world = World(tmp_path, monkeypatch, change_s=60.0)
    world.until(lambda: world.card.steps >= 1)
    world.card.unsampled = world.card.unscored = world.card.scored = 0
    world.progress = SimpleNamespace(at_target=True)
    monkeypatch.setattr(device_scheduler, "AGAIN_S", 60.0)
    monkeypatch.setattr(device_scheduler, "IDLE_S", 0.02)
    for role in ROLES:
        instance = world.crew[role].child.spec.instance
        world.workers.apply(worker_report(role=role, instance=instance, state="waiting", at_ms=0))
    shift = world.workers.leases["card"].shift
    world.until(lambda: world.workers.leases["card"].shift >= shift + 2)
    until_s = time.monotonic() + 0.3
    while time.monotonic() < until_s:
        world.tick()
    found = [event.holder for event in events(world) if event.turn >= shift and event.state == HELD]
    assert sorted(found) == sorted(f"{role}-0" for role in ROLES)


def test_a_server_that_still_has_memory_keeps_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its role's lock says so: it has not fallen asleep yet, or is being ended."""
    world = World(tmp_path, monkeypatch, change_s=60.0)
    scheduler = world.scheduler
    scheduler._config = load([EXAMPLE], [f"run.dir={tmp_path}", "rollout.engine=vllm"])
    card, over = world.config.devices[0], Lease(holder="rollout-0", instance="rollout/gone")
    path = lease.lock_file(Path(scheduler._config.folder), "server-0")
    path.parent.mkdir(parents=True, exist_ok=True)
    assert not scheduler._has_server(card, over)
    fd = lease.take(path)
    assert scheduler._has_server(card, over)
    assert not world.said
    monkeypatch.setattr(device_scheduler, "SERVER_S", -1.0)
    assert scheduler._has_server(card, over)
    assert f"end process {os.getpid()}, and go on with --resume" in world.said[-1]
    os.close(fd)
    assert not scheduler._has_server(card, over)


def test_who_was_granted_what_another_process_holds_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, change_s=60.0)
    fds = [lease.take(lease.lock_file(tmp_path, f"{role}-0")) for role in ROLES]
    limits = replace(world.config.deadlines, drain_s=0.05)
    world.config = replace(world.config, deadlines=limits)
    for role in ROLES:
        world.start(role)
    with pytest.raises(DeadlineError, match=f"device 'card', which process {os.getpid()} has not"):
        world.until(lambda: False, limit_s=30.0)
    for fd in fds:
        os.close(fd)


def test_a_process_without_its_lease_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease was declared lost while it had its memory: it must not work there any more."""
    world = World(tmp_path, monkeypatch, change_s=60.0)
    world.until(lambda: world.card.steps >= 1)
    found = world.workers.leases["card"]
    holder = next(p for w in world.crew.values() if (p := w.child).spec.instance == found.instance)
    world.until(lambda: found.state == HELD and found.is_of(holder.spec.instance))
    lost = device_lease(
        run="demo", turn=found.shift, state=LOST, holder=found.holder, instance=found.instance
    )
    with world.bus.producer("test") as pen:
        pen.commit([outgoing(CONTROL, lost)])
    with pytest.raises(lease.LeaseLostError, match="device 'card' was taken from"):
        holder.role.tick()
