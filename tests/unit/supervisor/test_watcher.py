"""What the supervisor reads from the log: who has worked, who owns the run, what is evaluated."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from rlstreams.schemas.events import EVALUATE, Event
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.errors import BrokerError, ConfigError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import (
    CONTROL,
    POLICY_VERSIONS,
    PROMPTS,
    STEPS,
    TRAJECTORIES,
    WORKER_EVENTS,
    Topic,
)
from rlstreams.streams.views.folds import Folds
from rlstreams.up.live.figures import Figures
from rlstreams.up.supervisor.progress import Progress
from rlstreams.up.supervisor.up import _say_changes
from rlstreams.up.supervisor.watcher import Watcher
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RunConfig, RunSection
from rlstreams.workers.loop.control import ControlFollower
from rlstreams.workers.loop.host import release
from tests.factories import (
    control_state,
    policy_published,
    prompt,
    step_completed,
    trainer_started,
    trajectory,
    worker_report,
)
from tests.logs import made_log
from tests.memory.bus import MemoryBus


def make_bus() -> MemoryBus:
    log = made_log()
    return MemoryBus(log, "run")


class Unasked(MemoryBus):
    """Does not say where topics end while its broker is gone."""

    is_gone = False

    def ends(self, topic: str) -> dict[Partition, int]:
        if self.is_gone:
            raise BrokerError("gone")
        return super().ends(topic)


def say(bus: MemoryBus, topic: Topic, *events: Event) -> None:
    with bus.producer("test") as producer:
        producer.commit([outgoing(topic, event) for event in events])


@contextmanager
def watching(bus: MemoryBus, figures: Figures | None = None) -> Iterator[Watcher]:
    with Watcher(bus, RunConfig(), is_live=False, figures=figures) as watcher:
        yield watcher


def test_work_is_what_a_process_committed() -> None:
    """A trajectory and a count are; a report without any, of what was only read, pulled or started,
    or of what others asked a judge's server that never came up, is no work."""
    folds = Folds()
    progress = Progress(folds)
    folds.apply(worker_report(instance="idle", counters={"tokens": 0.0}))
    folds.apply(worker_report(instance="idle", counters={"fetched_records": 9.0}))
    pulled = {"pulls": 1.0, "pull_s": 0.3, "pulled_bytes": 9.0, "server_starts": 1.0}
    folds.apply(worker_report(instance="idle", counters=pulled))
    asked = {"requests": 40.0, "answers": 38.0}
    folds.apply(worker_report(instance="idle", counters=asked))
    folds.apply(worker_report(instance="busy", counters={"tokens": 1.0}))
    folds.apply(trajectory(instance="sampler"))
    assert [False, True, True] == [progress.committed(i) for i in ("idle", "busy", "sampler")]


def test_who_writes_a_checkpoint_is_who_said_so_last() -> None:
    """Until it says something else; another process of the same worker does not count."""
    folds = Folds()
    progress = Progress(folds)
    seen = []
    for instance, state in (("a", "saving"), ("b", "starting"), ("a", "waiting")):
        folds.apply(worker_report(worker="trainer-0", instance=instance, state=state))
        seen.append([progress.is_saving(i) for i in ("a", "b")])
    assert [[True, False], [True, False], [False, False]] == seen


def test_the_owner_is_who_claimed_last() -> None:
    bus = make_bus()
    say(bus, STEPS, trainer_started(epoch=1, instance="a"), trainer_started(epoch=2, instance="b"))
    with watching(bus) as watcher:
        watcher.catch_up()
        assert [False, True] == [watcher.progress.owns_run(i) for i in ("a", "b")]


def test_the_last_version_is_evaluated_when_every_row_is_answered() -> None:
    """Neither another version's answers nor half of them will do."""
    bus = make_bus()
    rows = [prompt(group_id=f"e3-{row}", sample=0, purpose=EVALUATE) for row in (0, 1)]
    answers = [trajectory(group_id=p.group_id, sample=0, purpose=EVALUATE) for p in rows]
    say(bus, STEPS, trainer_started(), step_completed(3))
    say(bus, PROMPTS, *rows)
    with watching(bus) as watcher:
        say(bus, TRAJECTORIES, answers[0])
        watcher.catch_up()
        assert not watcher.is_evaluated()
        say(bus, TRAJECTORIES, answers[1])
        watcher.catch_up()
        assert watcher.is_evaluated()
        assert watcher.num_evaluated() == 2


def test_figures_are_written_once_and_an_evaluation_when_it_is_over() -> None:
    """What a start before has told is not told again; the last line says how the run ended."""
    bus, file = make_bus(), io.StringIO()
    figures = Figures(file)
    rows = [prompt(group_id=f"e2-{row}", sample=0, purpose=EVALUATE) for row in (0, 1)]
    answers = [trajectory(group_id=p.group_id, sample=0, purpose=EVALUATE) for p in rows]
    say(bus, STEPS, trainer_started(), step_completed(1))
    with watching(bus, figures) as watcher:
        watcher.catch_up()
        watcher.begin()
        say(bus, STEPS, step_completed(2))
        say(bus, PROMPTS, *rows)
        say(bus, TRAJECTORIES, answers[0])
        watcher.finish()
        say(bus, TRAJECTORIES, answers[1])
        watcher.finish()
        watcher.finish()
    figures.end("failed", "no", "ConfigError")
    step, evaluation, end = map(json.loads, file.getvalue().splitlines())
    assert ("step", 2, 100) == (step["kind"], step["step"], step["step_target"])
    assert {"reward", "loss", "tokens_per_s", "staleness_mean", "entropy"} <= step.keys()
    assert ("evaluation", 2) == (evaluation["kind"], evaluation["evaluation/samples"])
    expected = {"kind": "end", "outcome": "failed", "problem": "no", "error": "ConfigError"}
    assert expected == end


def test_an_evaluation_that_lacks_answers_is_written_at_the_end() -> None:
    """While the run goes on it may still be answered, though a later one is; a broker that cannot
    be asked whether all was read is asked again."""
    bus, file = Unasked(made_log(), "run"), io.StringIO()
    say(bus, STEPS, trainer_started(), step_completed(2))
    for name, sample in (("e1-0", 0), ("e1-0", 1), ("e2-0", 0)):
        say(bus, PROMPTS, prompt(group_id=name, sample=sample, purpose=EVALUATE))
    with watching(bus, Figures(file)) as watcher:
        for version in (1, 2):
            say(bus, TRAJECTORIES, trajectory(group_id=f"e{version}-0", sample=0, purpose=EVALUATE))
        watcher.catch_up()
        seen = []
        for bus.is_gone, watcher.is_broker_away in ((True, False), (False, True), (False, False)):
            watcher.say("")
            watcher.draw(())
            lines = map(json.loads, file.getvalue().splitlines())
            seen.append([line["policy_version"] for line in lines if line["kind"] == "evaluation"])
        watcher.finish()
    assert [[], [], [2]] == seen
    assert 1 == json.loads(file.getvalue().splitlines()[-1])["policy_version"]


def test_control_is_what_was_said_last() -> None:
    bus = make_bus()
    follower = ControlFollower(bus)
    assert follower.poll().state == "running"
    say(bus, CONTROL, control_state(state="paused"), control_state(state="draining"))
    assert follower.poll().state == "draining"
    follower.close()


def test_what_control_says_counts_by_its_place_in_the_log() -> None:
    """By the clock of `control drain` its host was an hour behind: it was not heard."""
    bus = make_bus()
    hour_ms = 3_600_000
    say(bus, CONTROL, control_state(state="draining", at_ms=now_ms() + hour_ms))
    with watching(bus) as watcher:
        watcher.catch_up()
        watcher.begin()
        assert "running" == watcher.control
        say(bus, CONTROL, control_state(state="draining", at_ms=now_ms() - hour_ms))
        watcher.poll()
        assert "draining" == watcher.control


def test_a_clock_that_is_off_is_said_once_and_makes_nobody_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a host that is an hour behind each report was hours old: its worker stood, for `up`."""
    monkeypatch.setattr("rlstreams.up.supervisor.watcher.APART_S", 0.0)
    bus, said = make_bus(), list[str]()
    with watching(bus) as watcher:
        watcher.say = said.append  # type: ignore[method-assign]
        watcher.begin()
        for _ in range(3):
            at_ms = now_ms() - 3_600_000
            report = worker_report(worker="rollout-0", host="far", at_ms=at_ms, state="working")
            say(bus, WORKER_EVENTS, report)
            watcher.poll()
    (told,) = [line for line in said if "GB are free" not in line]
    assert "host far is 3,600 s behind" in told


def test_why_the_guard_pauses_is_said() -> None:
    bus, said = make_bus(), list[str]()
    with watching(bus) as watcher:
        watcher.say = said.append  # type: ignore[method-assign]
        watcher.begin()
        say(bus, CONTROL, control_state(state="paused", by="trainer-0", reason="why", at_ms=1))
        watcher.poll()
        assert watcher.control == "paused"
    assert said == ["paused by trainer-0: why"]


def test_the_first_step_of_other_rewards_is_said_once() -> None:
    """Also where a worker was allowed to go on beside an edited reward."""
    bus, said = make_bus(), list[str]()
    with watching(bus) as watcher:
        watcher.phase, watcher.say = "running", said.append  # type: ignore[method-assign]
        judges = ({"aa": 8}, {"aa": 8}, {"aa": 4, "bb": 4}, {"bb": 8})
        steps = [step_completed(n, judged_by=judged) for n, judged in enumerate(judges, 1)]
        say(bus, STEPS, trainer_started(), *steps)
        watcher.catch_up()
    assert [
        "step 3 is the first of answers that were judged by other code or settings: aa -> aa, bb"
    ] == said


def test_a_ledger_that_lost_its_tail_is_refused_before_a_role_starts(tmp_path: Path) -> None:
    """By what was announced of later steps, and not a minute later by the trainer."""
    bus = make_bus()
    config = RunConfig(run=RunSection(dir=str(tmp_path)))
    say(bus, STEPS, trainer_started(config=resolved_json(config)), step_completed(1))
    say(bus, POLICY_VERSIONS, policy_published(1, epoch=1, step=1))
    with watching(bus) as watcher:
        watcher.catch_up()
        _say_changes(bus, watcher, config, is_resumed=True)
    say(bus, POLICY_VERSIONS, policy_published(5, epoch=1, step=5))
    with watching(bus) as watcher:
        watcher.catch_up()
        with pytest.raises(ConfigError, match=r"the end of steps is lost. Its newest step is 1"):
            _say_changes(bus, watcher, config, is_resumed=True)


OLDER = {"rlstreams": "0.0.9", "commit": "abc", "torch": "2.10.0"}


def test_a_resumed_run_names_releases_of_code_and_libraries_that_are_others(
    tmp_path: Path,
) -> None:
    """Among the changes, so that a redo that differs afterwards is no riddle."""
    bus, said = make_bus(), list[str]()
    config = RunConfig(run=RunSection(dir=str(tmp_path)))
    claim = trainer_started(config=resolved_json(config), hashes={}, versions=OLDER)
    say(bus, STEPS, claim, step_completed(1))
    with watching(bus) as watcher:
        watcher.catch_up()
        watcher.say = said.append  # type: ignore[method-assign]
        _say_changes(bus, watcher, config, is_resumed=True)
    (line,) = said
    assert line.startswith("continuing at step 2; changed: rlstreams: 0.0.9")
    assert f"; torch: 2.10.0 -> {version('torch')}" in line


def test_a_run_of_a_newer_release_is_refused_with_both_releases(tmp_path: Path) -> None:
    """Before a role begins, by the field."""
    bus = make_bus()
    config = RunConfig(run=RunSection(dir=str(tmp_path)))
    claim = trainer_started(config='{"rollout": {"unheard_of": 1}}', versions=OLDER)
    say(bus, STEPS, claim, step_completed(1))
    told = r"rollout\.unheard_of.*; rlstreams 0\.0\.9 \(commit abc\) recorded it, and this is "
    with watching(bus) as watcher:
        watcher.catch_up()
        with pytest.raises(ConfigError, match=told + re.escape(release())):
            _say_changes(bus, watcher, config, is_resumed=True)


def test_a_report_that_waited_for_the_broker_says_nothing_of_a_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is as old as the broker was away; the next one is not. So again when it dies anew."""
    bus, said, module = make_bus(), list[str](), "rlstreams.up.supervisor.watcher"
    now_s = time.monotonic()
    with watching(bus) as watcher:
        watcher.say = said.append  # type: ignore[method-assign]
        watcher.begin()
        for late_ms, later_s in ((50_000, 0.0), (0, 5.0), (50_000, 60.0), (50_000, 79.0)):
            monkeypatch.setattr(f"{module}.time.monotonic", lambda at_s=now_s + later_s: at_s)
            report = worker_report(worker="rollout-0", host="here", at_ms=now_ms() - late_ms)
            say(bus, WORKER_EVENTS, report)
            watcher.poll()
            monkeypatch.undo()
    assert [] == [line for line in said if "clock" in line]
