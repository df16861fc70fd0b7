"""What the supervisor does about a worker that ended."""

from __future__ import annotations

import pytest

from rlstreams.up.supervisor.restart import Action, Decision, RestartPolicy


def ended(policy: RestartPolicy, status: int, now_s: float = 0.0, *, committed: bool) -> Decision:
    return policy.ended(status, now_s=now_s, uptime_s=1.0, committed=committed)


def policy() -> RestartPolicy:
    return RestartPolicy("rollout-0", "rollout.0")


def test_done_is_done() -> None:
    """Exit 0 is not started again."""
    assert ended(policy(), 0, committed=False).action is Action.DONE


@pytest.mark.parametrize(("status", "words"), [(76, "another owner alive"), (78, "configuration")])
def test_what_a_restart_cannot_cure_stops_the_run(status: int, words: str) -> None:
    """An owner that lives and a bad configuration end the run at once, and are named."""
    decision = ended(policy(), status, committed=True)
    assert decision.action is Action.STOP
    assert words in decision.reason


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


def test_our_own_kill_is_no_failure() -> None:
    """However often a user kills a worker, it comes back at once."""
    one = policy()
    decisions = [one.excused(-9, "was killed as asked")] * 5
    assert {(Action.RESTART, 0.0)} == {(d.action, d.delay_s) for d in decisions}


def test_a_fencing_that_was_asked_for_is_forgiven() -> None:
    """It gets the pause of any fencing, and does not count as the first of two."""
    one = policy()
    asked_for = one.excused(75, "was suspended and resumed as planned")
    assert (Action.RESTART, True) == (asked_for.action, asked_for.delay_s > 0)
    assert ended(one, 75, committed=True).action is Action.RESTART


def test_a_good_end_too_early_is_no_end() -> None:
    """A worker that somebody drained from outside is started again."""
    decision = policy().left(0)
    assert (Action.RESTART, True) == (decision.action, "the run goes on" in decision.reason)


def test_an_owner_that_we_reaped_is_not_alive() -> None:
    """Its last words may come into sight late; the next start takes over."""
    decision = policy().owner_gone(76)
    assert (Action.RESTART, True) == (decision.action, decision.delay_s > 0)
