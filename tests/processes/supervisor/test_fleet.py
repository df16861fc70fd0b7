"""The fleet with real, small processes: restarts, kills, drain order, orphans."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rlstreams.streams.log.roles import ROLES
from rlstreams.streams.log.text import tail
from rlstreams.up.supervisor import restart
from rlstreams.up.supervisor import run as drain_module
from rlstreams.up.supervisor.run import Drain
from tests.processes.supervisor.small import DEAF, OBEDIENT, Log, all_up, fleet_of, until


@pytest.fixture(autouse=True)
def brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a pause is, `test_restart` asks; here it is enough that there is one."""
    monkeypatch.setattr(restart, "FIRST_S", 0.02)
    monkeypatch.setattr(restart, "FENCED_PAUSE_S", 0.02)


def test_a_fork_that_waits_for_imports_holds_no_server_up(tmp_path: Path) -> None:
    """The fork server answers once it has imported torch: what needs no fork starts before."""
    with fleet_of(tmp_path, dict.fromkeys(ROLES, OBEDIENT)) as (_, spawner, _):
        assert ["prompts", "server", "rollout", "logprob", "trainer"] == [
            spec.role for spec in spawner.started
        ]


def test_a_worker_that_ends_well_stays_ended(tmp_path: Path) -> None:
    with fleet_of(tmp_path, {"trainer": "pass"}) as (fleet, spawner, _):
        until(fleet, lambda: fleet.is_done("trainer"))
        fleet.tick()
        assert len(spawner.started) == 1


def test_a_killed_worker_comes_back(tmp_path: Path) -> None:
    """As another instance of the same worker, and the kill is counted."""
    progress = Log()
    with fleet_of(tmp_path, {"rollout": OBEDIENT}, progress) as (fleet, spawner, said):
        (worker,) = fleet.workers
        assert fleet.kill(worker)
        until(fleet, lambda: len(spawner.started) == 2)
        first, second = spawner.started
        assert (first.worker, first.instance != second.instance) == (second.worker, True)
        assert fleet.num_killed == 1
        assert "killed as asked" in said[0]
        assert fleet.failure is None
        fleet.tick()
        assert 1 == len(said)
        progress.started.add(second.instance)
        fleet.tick()
        assert "rollout-0 has started again" == said[1]
        fleet.tick()
        assert 2 == len(said)


def test_a_successor_is_told_who_was_seen_to_end(tmp_path: Path) -> None:
    """Every one of its predecessors, but none that a rival fenced: that one may own the run."""
    for status, told in ((1, True), (75, False)):
        script = f"raise SystemExit({status})"
        with fleet_of(tmp_path / str(status), {"trainer": script}) as (fleet, spawner, _):
            until(fleet, lambda spawner=spawner: len(spawner.started) > 1)  # type: ignore[misc]
            first, second = spawner.started[:2]
            assert ((), (first.instance,) if told else ()) == (first.reaped, second.reaped)


def test_a_kill_can_arm_the_successor(tmp_path: Path) -> None:
    """Its death there is no failure, and the one after it is not armed."""
    killed_by_itself = "import os, sys; print('up', flush=True); os.kill(os.getpid(), 9)"
    with fleet_of(tmp_path, {"rollout": OBEDIENT}) as (fleet, spawner, said):
        (worker,) = fleet.workers
        until(fleet, lambda: all_up(fleet))
        spawner.scripts["rollout"] = killed_by_itself
        assert fleet.kill(worker, crash_at="commit.before:2")
        until(fleet, lambda: len(spawner.started) == 2)
        spawner.scripts["rollout"] = OBEDIENT
        until(fleet, lambda: len(spawner.started) == 3)
        assert ["", "commit.before:2", ""] == [spec.crash_at for spec in spawner.started]
        assert ["", "commit.before:2"] == [exited.died_at for exited in fleet.exits]
        assert "died at commit.before:2 as asked" in said[1]
        assert 2 == fleet.num_killed


def test_a_sleeper_can_be_replaced(tmp_path: Path) -> None:
    """The successor runs beside it; what becomes of the old process is noted, and harms nobody."""
    fenced_when_woken = "import os, signal, sys; print('up', flush=True); signal.pause(); "
    script = f"import sys, signal\nsignal.signal(signal.SIGCONT, lambda *_: sys.exit(75))\n{fenced_when_woken}"  # noqa: E501
    with fleet_of(tmp_path, {"trainer": script}, Log(owns=True)) as (fleet, spawner, _):
        (worker,) = fleet.workers
        until(fleet, lambda: all_up(fleet))
        old = fleet.sleep(worker)
        assert old is not None
        fleet.replace(worker)
        assert (1, ()) == (len(fleet.replaced), spawner.started[1].reaped)
        old.signal(signal.SIGCONT)
        until(fleet, lambda: not fleet.replaced)
        (exited,) = fleet.exits
        assert (75, True, old.spec.instance) == (
            exited.status, exited.was_replaced, exited.instance
        )  # fmt: skip
        assert worker.is_alive
        assert 2 == len(spawner.started)


def test_what_sleeps_at_the_end_is_killed(tmp_path: Path) -> None:
    """A stopped process cannot drain; nothing is left behind."""
    with fleet_of(tmp_path, {"rollout": OBEDIENT}) as (fleet, _, _said):
        (worker,) = fleet.workers
        until(fleet, lambda: all_up(fleet))
        old = fleet.sleep(worker)
        assert old is not None
        fleet.replace(worker)
        fleet.close()
        assert (-signal.SIGKILL, False) == (old.poll(), worker.is_alive)


def test_fenced_twice_through_our_own_stops_does_not_end_the_run(tmp_path: Path) -> None:
    """A woken sleeper that finds itself fenced did what it should."""
    # One write: `print` without a buffer writes the end of the line apart, perhaps after a stop.
    script = (
        "import os, signal, sys; signal.signal(signal.SIGCONT, lambda *_: sys.exit(75)); "
        "os.write(1, b'up\\n'); signal.pause()"
    )
    with fleet_of(tmp_path, {"logprob": script}) as (fleet, spawner, _):
        (worker,) = fleet.workers
        for number in (1, 2):
            until(fleet, lambda n=number: len(tail(worker.log, 12)) == n)  # type: ignore[misc]
            child = fleet.sleep(worker)
            child.signal(signal.SIGCONT)
            until(fleet, lambda n=number: len(fleet.exits) == n)  # type: ignore[misc]
            worker.restart_at_s = 0.0  # the pause is tested elsewhere
            until(fleet, lambda n=number: len(spawner.started) == n + 1)  # type: ignore[misc]
        assert fleet.failure is None


def test_a_worker_that_was_drained_from_outside_comes_back(tmp_path: Path) -> None:
    """Exit 0 of rollout and logprob, and of prompts before the target, is no end."""
    scripts = {"rollout": "pass", "prompts": "pass"}
    with fleet_of(tmp_path, scripts) as (fleet, spawner, said):
        until(fleet, lambda: {"rollout", "prompts"} <= {s.role for s in spawner.started[2:]})
        assert "the run goes on" in said[0]
    with fleet_of(tmp_path / "done", scripts, Log(at_target=True)) as (fleet, _, _said):
        until(fleet, lambda: fleet.is_done("prompts"))
        assert not fleet.is_done("rollout")


def test_only_an_owner_of_another_run_of_ours_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 76 ends the run in the end, unless the owner is a process that we saw end."""
    monkeypatch.setattr(restart, "OWNER_S", 0.1)
    script = "raise SystemExit(76)"
    with fleet_of(tmp_path, {"trainer": script}) as (fleet, spawner, _):
        until(fleet, lambda: fleet.failure is not None)
        assert 1 < len(spawner.started)
    with fleet_of(tmp_path / "ours", {"trainer": script}, Log(owns=True)) as (fleet, spawner, _):
        until(fleet, lambda: len(spawner.started) == 2)
        first, second = spawner.started
        assert (None, (first.instance,)) == (fleet.failure, second.reaped)


_RAISES = """
try:
    raise OSError(28, "No space left on device", "weights/v1")
except OSError as err:
    import traceback
    traceback.print_exc()
    raise SystemExit(1)
"""


def test_a_death_is_told_with_its_cause(tmp_path: Path) -> None:
    """The last error of that process alone; also of one that was killed, and of one that drains."""
    with fleet_of(tmp_path, {"trainer": _RAISES}) as (fleet, spawner, said):
        until(fleet, lambda: len(spawner.started) == 4)
        assert all("[Errno 28] No space left on device: 'weights/v1'; waiting" in it for it in said)
        assert fleet.failure is None
        spawner.scripts["trainer"] = "raise SystemExit(1)"
        until(fleet, lambda: len(spawner.started) == 6)
        assert "failed (exit 1)" in said[-1]
        assert "Errno" not in said[-1]
        spawner.scripts["trainer"] = _RAISES
        until(fleet, lambda: not fleet.workers[0].is_alive)
        until(fleet, lambda: fleet.workers[0].is_alive)
        fleet.is_draining = True
        until(fleet, lambda: not fleet.workers[0].is_alive)
        assert "trainer-0 failed (exit 1) while it drained: OSError: [Errno 28]" in said[-1]


def test_a_worker_that_never_works_stops_the_run(tmp_path: Path) -> None:
    """After three quick failures, with its last lines."""
    with fleet_of(tmp_path, {"logprob": "print('no such model'); raise SystemExit(1)"}) as (
        fleet,
        spawner,
        _,
    ):
        until(fleet, lambda: fleet.failure is not None)
        assert fleet.failure.worker == "logprob-0"
        assert list(fleet.failure.last_lines) == ["no such model"] * 3
        assert len(spawner.started) == 3


def test_roles_drain_one_after_another(tmp_path: Path) -> None:
    """Prompts first, the trainer last; nobody is started again."""
    with fleet_of(tmp_path, dict.fromkeys(ROLES, OBEDIENT)) as (fleet, spawner, said):
        until(fleet, lambda: all_up(fleet))
        drain = Drain(fleet, 120.0, said.append, save_s=120.0)
        until(fleet, lambda: drain.tick() or drain.is_over)
        ended = [int(tail(worker.log, 12)[-1]) for worker in fleet.workers]
        assert ended == sorted(ended)
        assert len(spawner.started) == len(ROLES)
        assert said == []


def test_a_worker_that_is_told_to_end_as_it_starts_is_excused(tmp_path: Path) -> None:
    """It cannot listen yet, so the signal itself ends it: chaos must not call that unexplained."""
    with fleet_of(
        tmp_path, {"prompts": "import time; print('up', flush=True); time.sleep(3600)"}
    ) as (fleet, _, _said):
        until(fleet, lambda: all_up(fleet))
        drain = Drain(fleet, 120.0, print, save_s=120.0)
        until(fleet, lambda: drain.tick() or drain.is_over)
        (end,) = fleet.exits
        assert (-signal.SIGTERM, "was asked to end before it could listen") == (
            end.status,
            end.excuse,
        )


def test_a_worker_that_does_not_drain_is_killed(tmp_path: Path) -> None:
    with fleet_of(tmp_path, {"rollout": DEAF}) as (fleet, _, said):
        until(fleet, lambda: all_up(fleet))
        drain = Drain(fleet, -9.9, said.append, save_s=120.0)
        until(fleet, lambda: drain.tick() or drain.is_over)
        assert "rollout-0 did not drain" in said[0]


def test_a_drain_waits_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than for anything else; it says so, and the exit behind it has its time again."""
    monkeypatch.setattr(drain_module, "SAY_S", 0.1)
    writing = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while not Path("{written}").exists():
    time.sleep(0.01)
"""
    log, written = Log(), tmp_path / "written"
    script = writing.format(written=written)
    with fleet_of(tmp_path, {"trainer": script}, log) as (fleet, _, said):
        until(fleet, lambda: all_up(fleet))
        log.saves = True
        drain = Drain(fleet, -9.9, said.append, save_s=120.0)
        until(fleet, lambda: drain.tick() or bool(said))
        assert ["trainer-0 writes a checkpoint: the drain waits for it, at most 120 s; "
                "a second Ctrl-C kills"] == said  # fmt: skip
        log.saves = False
        drain.tick()
        written.touch()
        until(fleet, lambda: drain.tick() or drain.is_over)
        assert 1 == len(said)


def test_a_checkpoint_has_a_deadline_in_a_drain_too(tmp_path: Path) -> None:
    """Its own, whatever a drain may take."""
    log = Log()
    with fleet_of(tmp_path, {"trainer": DEAF}, log) as (fleet, _, said):
        until(fleet, lambda: all_up(fleet))
        log.saves = True
        drain = Drain(fleet, -9.9, said.append, save_s=-9.5)
        until(fleet, lambda: drain.tick() or drain.is_over)
        assert 1 == len(said)
        assert "trainer-0 has not finished its checkpoint within -9.5 s: killed" in said[0]
