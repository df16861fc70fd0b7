"""When a role gives itself up: it says it works and does nothing, or its tick never ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.streams.views.stalls import StallLimits
from rlstreams.streams.workers import Life
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.stall import StuckError, StuckWatch, limits_of, tick_limit_s
from tests.logs import made_log
from tests.memory.bus import MemoryBus

ROOT = Path(__file__).parents[3]
STALL_S = 5.0
LIMITS = StallLimits(groups_per_step=1, stall_s=STALL_S, pull_s=20.0)


def config(**overrides: object) -> RunConfig:
    words = [f"{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    return load([ROOT / "infra/examples/demo.toml"], words)


def watch() -> StuckWatch:
    return StuckWatch("logprob-0", "logprob", LIMITS)


def looks(watch: StuckWatch, start_s: int, num: int, state: str, **counters: float) -> list[str]:
    """A look a second; what it says meanwhile."""
    said = [watch.look(start_s + s, state, "for it", counters) for s in range(num)]
    return [line for line in said if line is not None]


def test_work_that_does_nothing_for_too_long_ends_the_worker() -> None:
    """Named: the worker, what it says it does, since when, and the limit."""
    it = watch()
    looks(it, 0, 5, "working")
    with pytest.raises(StuckError, match=r"logprob-0 says 'working for it' .* for 5 s.*limit is 5"):
        looks(it, 5, 1, "working")


@pytest.mark.parametrize("counter", ["samples", "micro_batches"])
def test_progress_begins_the_count_anew(counter: str) -> None:
    """A sample finished counts, and a micro-batch of a long step; seconds spent busy do not."""
    it = watch()
    for done in range(4):
        looks(it, 4 * done, 4, "working", **{counter: float(done)})
    with pytest.raises(StuckError):
        looks(it, 16, 3, "working", busy_s=9.0, **{counter: 3.0})


def test_a_worker_that_waits_only_says_so() -> None:
    """Somebody else is stuck: it is told once per `stall_s`, and never ends for it."""
    assert [
        "logprob-0 is waiting for it for 5 s",
        "logprob-0 is waiting for it for 10 s",
    ] == looks(watch(), 0, 12, "waiting")


def test_time_in_which_the_process_itself_stood_does_not_count() -> None:
    """Stopped for an hour in the middle of its work and continued: one second."""
    it = watch()
    looks(it, 0, 3, "working")
    looks(it, 3600, 2, "working")
    with pytest.raises(StuckError):
        looks(it, 3602, 1, "working")


def test_each_state_has_its_own_limit() -> None:
    """A sample, a pull and a checkpoint have deadlines of their own; others get `stall_s`."""
    given = config(
        deadlines__stall_s=50, rollout__sample_deadline_s=100, reward__timeout_s=10,
        reward__attempts=2,
        rollout__max_attempts=2, weights__pull_deadline_s=70, deadlines__checkpoint_s=60,
    )  # fmt: skip
    limits, states = limits_of(given), ("working", "pulling", "saving", "waiting", "starting")
    assert [240.0, 70.0, 60.0, None, None] == [limits.own("rollout", state) for state in states]
    assert 50.0 == limits.own("trainer", "working")
    assert limits_of(config(deadlines__stall_s=0)).own("logprob", "working") is None


@pytest.mark.parametrize("role", ["prompts", "rollout", "logprob", "trainer"])
@pytest.mark.parametrize("state", ["working", "pulling", "saving"])
def test_a_worker_ends_itself_before_others_blame_it(role: str, state: str) -> None:
    """Its restart may cure what `up` would end the run for."""
    limits = limits_of(config())
    worker = Life(
        worker=f"{role}-0", role=role, instance="i", state=state, detail="", policy_version=1,
        host="", from_ms=0, at_ms=0, since_ms=0, moved_ms=0, counters={},
    )  # fmt: skip
    own_s = limits.own(role, state)
    assert own_s is not None
    assert own_s < limits.of(worker)


def test_a_tick_may_hold_a_commit() -> None:
    """Its limit is never below what a commit and a predecessor's transaction may take."""
    assert 130.0 == tick_limit_s(config(deadlines__stall_s=1))
    assert 500.0 == tick_limit_s(config(deadlines__stall_s=500))
    assert 0.0 == tick_limit_s(config(deadlines__stall_s=0))


def test_a_reporter_gives_up_for_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every role asks it in each tick, so every role is watched."""
    log = made_log("demo")
    context = Context(
        config=config(deadlines__stall_s=3), bus=MemoryBus(log, "demo"), role="logprob",
        ordinal=0, instance="i",
    )  # fmt: skip
    now = iter(range(100))
    monkeypatch.setattr("rlstreams.workers.loop.reporter.time.monotonic", lambda: float(next(now)))
    reporter = Reporter(context)
    reporter.state("working")
    for _ in range(3):
        reporter.due()
    with pytest.raises(StuckError, match="logprob-0 says 'working'"):
        reporter.due()
