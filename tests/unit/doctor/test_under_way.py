"""Questions to a run that is under way."""

from __future__ import annotations

from contextlib import closing

from rlstreams.check.doctor.check import Level
from rlstreams.check.doctor.diagnose import learning_check, releases_check
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.topics import STEPS, WORKER_EVENTS
from rlstreams.streams.views.workers import releases_line, throughput
from rlstreams.workers.bootstrap.seats import WorkersThere
from tests import factories
from tests.logs import made_log
from tests.memory.bus import MemoryBus


def test_a_run_under_way_is_asked_why_it_does_not_learn() -> None:
    """By its steps; before the first one there is nothing to say."""
    log = made_log("demo")
    bus = MemoryBus(log, "demo")
    producer = bus.producer("trainer")
    assert learning_check(bus) is None
    flat = {"reward_std": 0.0, "equal_reward_groups": 1.0}
    claim = factories.trainer_started(epoch=1)
    samples = tuple(factories.sample_ref(group_id=str(n)) for n in range(16))
    steps = [
        factories.step_completed(step=n, epoch=1, metrics=flat, samples=samples) for n in (1, 2, 3)
    ]
    producer.commit([outgoing(STEPS, claim), outgoing(STEPS, steps[0])])
    assert (early := learning_check(bus)) is not None
    assert (early.level, early.found[:20]) == (Level.OK, "1 step shows nothing")
    producer.commit([outgoing(STEPS, step) for step in steps[1:]])
    assert (late := learning_check(bus)) is not None
    assert (late.level, late.found[:22]) == (Level.WARN, "nothing can be learnt:")
    assert "rlstreams inspect --step 3 RUN" in late.advice


def test_a_fleet_of_several_releases_is_named() -> None:
    """By the newest reports of workers that live; one of an older release names none."""
    bus = MemoryBus(made_log("demo"), "demo")
    producer, now = bus.producer("trainer"), now_ms()

    def report(worker: str, release: str, state: str = "working") -> None:
        role, instance = worker.partition("-")[0], f"{worker} {release}"
        event = factories.worker_report(
            worker=worker, role=role, instance=instance, state=state, release=release, at_ms=now
        )
        producer.commit([outgoing(WORKER_EVENTS, event)])

    assert releases_check(bus) is None
    report("trainer-0", "0.2.0 (commit b)")
    report("prompts-0", "0.1.0 (commit a)", "stopped")
    assert (one := releases_check(bus)) is not None
    assert (one.level, one.found) == (Level.OK, "all workers have 0.2.0 (commit b)")
    with closing(WorkersThere(bus)) as there:
        there.catch_up()
        assert "" == releases_line(throughput(there.workers).workers), "nor in report and page"
    report("rollout-0", "0.1.0 (commit a)")
    report("rollout-1", "")
    assert (several := releases_check(bus)) is not None
    assert several.level is Level.WARN
    assert several.found == (
        "0.1.0 (commit a): rollout-0; one that is not reported: rollout-1; "
        "0.2.0 (commit b): trainer-0"
    )
