"""What the supervisor does about a worker that ended."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from rlstreams.up.supervisor.restart import OWNER_S, Action, Decision, Exited, RestartPolicy

KILLS = [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP]
CRASHES = [-signal.SIGSEGV, -signal.SIGABRT]


def ended(
    policy: RestartPolicy, status: int, now_s: float = 0.0, *, committed: bool, **more: object
) -> Decision:
    return policy.after(end(status, seen_s=now_s, committed=committed, **more))


def end(status: int, **more: Any) -> Exited:
    values = {"worker": "rollout-0", "instance": "one", "seen_s": 0.0, "uptime_s": 1.0, **more}
    return Exited(status=status, **values)


def policy() -> RestartPolicy:
    return RestartPolicy("rollout-0", "rollout.0")


def test_done_is_done() -> None:
    """Exit 0 is not started again."""
    assert ended(policy(), 0, committed=False).action is Action.DONE


def test_what_a_restart_cannot_cure_stops_the_run() -> None:
    """A bad configuration ends the run at once, with its sentence."""
    decision = ended(policy(), 78, committed=True, cause="ConfigError: model.path: no such folder")
    assert decision.action is Action.STOP
    assert "configuration (exit 78) after 1.0 s: ConfigError: model.path" in decision.reason


def test_an_owner_that_stays_ends_the_run() -> None:
    """One of an `up` that was killed is gone when it has drained; until then it is looked for."""
    one = policy()
    actions = [ended(one, 76, now_s=1 + now_s, committed=False).action for now_s in (0.0, OWNER_S)]
    assert [Action.RESTART, Action.STOP] == actions


def test_fenced_twice_within_ten_minutes_ends_the_run() -> None:
    """The first time gets a pause; the second names the transactional id."""
    one = policy()
    first = ended(one, 75, now_s=100.0, committed=True)
    assert (first.action, first.delay_s > 0) == (Action.RESTART, True)
    second = ended(one, 75, now_s=600.0, committed=True)
    assert second.action is Action.STOP
    assert "'rollout.0'" in second.reason


def test_fenced_again_after_a_long_time_is_a_first_time() -> None:
    """Ten minutes of peace are forgiven."""
    one = policy()
    ended(one, 75, now_s=100.0, committed=True)
    assert ended(one, 75, now_s=800.0, committed=True).action is Action.RESTART


def test_three_quick_failures_in_a_row_stop_the_run() -> None:
    """Each waits longer than the one before, the third is the last."""
    one = policy()
    decisions = [ended(one, 1, committed=False) for _ in range(3)]
    assert [d.action for d in decisions] == [Action.RESTART, Action.RESTART, Action.STOP]
    assert 0 < decisions[0].delay_s < decisions[1].delay_s


def test_a_worker_that_committed_something_is_always_started_again() -> None:
    """A failure after real work clears the count, and needs no pause."""
    one = policy()
    for _ in range(5):
        ended(one, -9, committed=False)
        decision = ended(one, -9, committed=True)
        assert (decision.action, decision.delay_s) == (Action.RESTART, 0.0)
        assert "SIGKILL" in decision.reason


@pytest.mark.parametrize(
    ("statuses", "has_started", "action"),
    [
        (KILLS, False, Action.RESTART),  # of a role that starts, or that has nothing to do
        (KILLS, True, Action.RESTART),
        (CRASHES, True, Action.RESTART),  # somebody else may have sent it; a stall ends it if not
        (CRASHES, False, Action.STOP),
        ([1], True, Action.STOP),
    ],
)
def test_who_was_killed_did_not_fail(
    statuses: list[int], has_started: bool, action: Action
) -> None:
    """However often; each comes back later than the one before, up to a limit."""
    one = policy()
    found = [
        ended(one, status, committed=False, has_started=has_started) for status in statuses * 6
    ]
    assert action is found[-1].action
    if action is Action.RESTART:
        assert found[0].delay_s < found[2].delay_s <= found[-1].delay_s <= 15.0


def test_a_full_disk_is_waited_for_with_a_deadline() -> None:
    """Neither a crash loop nor the third failure; then the end, with the cause in the sentence."""
    one = RestartPolicy("trainer-0", "trainer.0", room_s=60.0)
    cause = "OSError: [Errno 28] No space left on device"
    found = [
        ended(one, 1, 100.0 + now_s, committed=False, cause=cause, is_disk_full=True)
        for now_s in (0, 5, 15, 30, 59, 60)
    ]
    assert [Action.RESTART] * 5 + [Action.STOP] == [decision.action for decision in found]
    assert found[1].delay_s > found[0].delay_s
    assert all(cause in decision.reason for decision in found)
    assert "waiting for room on the disk, at most 1 s" in found[4].reason
    ended(one, 1, 200.0, committed=True)
    again = ended(one, 1, 200.0, committed=False, cause=cause, is_disk_full=True)
    assert Action.RESTART is again.action


def test_our_own_kill_is_no_failure() -> None:
    """However often a user kills a worker, it comes back at once."""
    one = policy()
    decisions = [one.after(end(-9, excuse="was killed as asked"))] * 5
    assert {(Action.RESTART, 0.0)} == {(d.action, d.delay_s) for d in decisions}


def test_a_fencing_that_was_asked_for_is_forgiven() -> None:
    """It gets the pause of any fencing, and does not count as the first of two."""
    one = policy()
    asked_for = one.after(end(75, excuse="was suspended and resumed as planned"))
    assert (Action.RESTART, True) == (asked_for.action, asked_for.delay_s > 0)
    assert ended(one, 75, committed=True).action is Action.RESTART


def test_a_good_end_too_early_is_no_end() -> None:
    """A worker that somebody drained from outside is started again."""
    decision = policy().after(end(0), may_leave=False)
    assert (Action.RESTART, True) == (decision.action, "the run goes on" in decision.reason)


def test_an_owner_that_we_reaped_is_not_alive() -> None:
    """Its last words may come into sight late; the next start takes over."""
    decision = policy().after(end(76), is_owner_gone=True)
    assert (Action.RESTART, True) == (decision.action, decision.delay_s > 0)
