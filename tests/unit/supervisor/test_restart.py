"""What the supervisor does about a worker that ended."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from rlstreams.up.supervisor.restart import OWNER_S, Action, Decision, Exited, RestartPolicy

KILLS = [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP]
CRASHES = [-signal.SIGSEGV, -signal.SIGABRT]


def end(status: int, **more: Any) -> Exited:
    values = {"worker": "rollout-0", "instance": "one", "seen_s": 0.0, "uptime_s": 1.0, **more}
    return Exited(status=status, **{"committed": False, **values})


def ended(policy: RestartPolicy, status: int, now_s: float = 0.0, **more: Any) -> Decision:
    return policy.after(end(status, seen_s=now_s, **more))


def policy() -> RestartPolicy:
    return RestartPolicy("rollout-0", "rollout.0")


def done_about(decision: Decision) -> str:
    later = decision.action is Action.RESTART and decision.delay_s > 0
    return "later" if later else decision.action.name.lower()


BROKEN = {"committed": True, "cause": "ConfigError: model.path: no such folder"}
AS_PLANNED = {"excuse": "was suspended and resumed as planned"}
# How a worker ended, time after time; what is done about it each time; what the last one says.
ENDS = {
    "a good end": ([end(0)], "done", ""),
    "what a restart cannot cure": ([end(78, **BROKEN)], "stop", "n (exit 78) after 1.0 s: ConfigE"),
    "an owner that stays": (
        [end(76, seen_s=1), end(76, seen_s=1 + OWNER_S)],
        "later stop",
        "exit 76",
    ),
    "fenced twice": ([end(75), end(75, seen_s=500.0)], "later stop", "'rollout.0'"),
    "fenced, and again long after": ([end(75), end(75, seen_s=700.0)], "later later", ""),
    "fenced as asked, then fenced": ([end(75, **AS_PLANNED), end(75)], "later later", ""),
    "killed as asked": ([end(-9, excuse="was killed as asked")] * 5, "restart " * 5, "as asked"),
    "no start, though as asked": ([end(78, excuse="was killed as asked")], "stop", "exit 78"),
    "work between kills": ([end(-9), end(-9, committed=True)] * 5, "later restart " * 5, "KILL"),
    "memory ran out each time": (
        [end(-9, is_out_of_memory=True, has_started=True, cause="the kernel ended it")] * 3,
        "later later stop",
        "SIGKILL after 1.0 s: the kernel ended it, the 3rd time in a row",
    ),
    "memory ran out, and once it worked": (
        [end(-9, is_out_of_memory=True), end(-9, is_out_of_memory=True, committed=True)] * 3,
        "later restart " * 3,
        "KILL",
    ),
    "work between failures": (
        [end(1), end(1), end(1, committed=True), end(1), end(1)],
        "later later restart later later",
        "exit 1",
    ),
    "work before a kill as asked": (
        [end(1), end(1), end(-9, committed=True, excuse="was killed as asked"), end(1)],
        "later later restart later",
        "exit 1",
    ),
    "work before it was fenced": (
        [end(1), end(1), end(75, committed=True), end(1), end(1)],
        "later later later later later",
        "exit 1",
    ),
    "kills as asked between failures": (
        [end(1), end(1), end(-9, excuse="was killed as asked"), end(1)],
        "later later restart stop",
        "the 3rd time in a row within 0 s without committing",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_is_done_about_an_end(case: str) -> None:
    ends, expected, says = ENDS[case]
    one = policy()
    found = [one.after(end) for end in ends]
    assert expected.split() == [done_about(decision) for decision in found]
    assert says in found[-1].reason


@pytest.mark.parametrize(
    ("status", "what", "says"),
    [
        (0, {"may_leave": False}, "the run goes on"),  # somebody drained it from outside
        (76, {"is_owner_gone": True}, "that one has ended"),  # its last words come into sight late
    ],
)
def test_an_end_that_is_none_is_followed_by_a_start(
    status: int, what: dict[str, bool], says: str
) -> None:
    decision = policy().after(end(status), **what)
    assert (Action.RESTART, True) == (decision.action, says in decision.reason)


def test_three_quick_failures_in_a_row_stop_the_run() -> None:
    """Each waits longer than the one before, the third is the last."""
    one = policy()
    decisions = [ended(one, 1, committed=False) for _ in range(3)]
    assert [d.action for d in decisions] == [Action.RESTART, Action.RESTART, Action.STOP]
    assert 0 < decisions[0].delay_s < decisions[1].delay_s


NO_SUCH = "ServerEndedError: server http://a:1 failed (exit 2): vllm: error: no argument --x"
KILLED = "ServerEndedError: server http://a:1 was ended by SIGKILL"
NO_BROKER = "BrokerError: Kafka at b:9092: looking up t: _TRANSPORT"


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ([NO_SUCH, NO_SUCH], "later stop"),
        ([NO_SUCH, KILLED, NO_SUCH], "later later stop"),  # three failures, of two kinds
        ([NO_SUCH, "", NO_SUCH, NO_SUCH], "later restart later stop"),  # ready in between
        ([KILLED, KILLED, KILLED], "later later stop"),
        ([NO_BROKER, NO_BROKER, NO_BROKER], "later later stop"),
    ],
)
def test_a_server_that_cannot_start_is_given_up_at_the_second_start(
    causes: list[str], expected: str
) -> None:
    """A start takes minutes, and its own words say that a third would fail; "": it was ready."""
    one = RestartPolicy("server-0", "server.0", starts_slowly=True)
    found = [ended(one, 1, committed=not cause, cause=cause) for cause in causes]
    assert expected.split() == [done_about(decision) for decision in found]
    assert all(cause in decision.reason for cause, decision in zip(causes, found, strict=True))


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
    one = RestartPolicy("trainer-0", "trainer.0", room_s=60.0, folder=Path("runs/demo"))
    cause = "OSError: [Errno 28] No space left on device"
    found = [
        ended(one, 1, 100.0 + now_s, committed=False, cause=cause, is_disk_full=True)
        for now_s in (0, 5, 15, 30, 59, 60)
    ]
    assert [Action.RESTART] * 5 + [Action.STOP] == [decision.action for decision in found]
    assert found[1].delay_s > found[0].delay_s
    assert all(cause in decision.reason for decision in found)
    assert "waiting for room on the disk under runs/demo, at most 1 s" in found[4].reason
    ended(one, 1, 200.0, committed=True)
    again = ended(one, 1, 200.0, committed=False, cause=cause, is_disk_full=True)
    assert Action.RESTART is again.action
