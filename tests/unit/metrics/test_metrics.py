"""Figures for other programs: what the log says, once, however it is read."""

from __future__ import annotations

import csv
import io
import json
import threading
import urllib.request
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from socketserver import BaseServer
from types import SimpleNamespace
from typing import Any

import pytest

from rlstreams.schemas.events import EVALUATE, Event, ServerLoad
from rlstreams.show.metrics import rows as reading
from rlstreams.show.metrics.prometheus import families, served
from rlstreams.show.metrics.rows import (
    CsvTable,
    JsonLines,
    MetricRows,
    MetricsRow,
    SamplePicks,
    read_rows,
)
from rlstreams.show.track.sinks import SINKS
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import CALLS, DEAD_LETTERS, PROMPTS, STEPS, TRAJECTORIES, Topic
from rlstreams.streams.views.feed import Feed, Views
from rlstreams.words.spelling import NUMBERS
from rlstreams.workers.config.operation import TrackSection
from tests import factories
from tests.call_events import NOW_MS, session_closed, session_opened
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog
from tests.unit.sessions.test_fold import call

DEMO = str(Path(__file__).parents[3] / "infra/examples/demo.toml")
EVALUATED = {"group_id": "e2-0", "purpose": EVALUATE}


class Kept:
    """A sink for tests."""

    def __init__(self) -> None:
        self.rows: list[MetricsRow] = []
        self.has_some = threading.Event()

    def write(self, rows: Sequence[MetricsRow]) -> None:
        self.rows += rows
        self.has_some.set()

    def close(self) -> None:
        """Nothing is open."""


def send(log: MemoryLog, *pairs: tuple[Topic, Event]) -> None:
    MemoryBus(log, "run").producer("any.0").commit([outgoing(topic, e) for topic, e in pairs])


def step(number: int, epoch: int = 1, **changes: object) -> tuple[Topic, Event]:
    values = {
        "policy_version": number,
        "epoch": epoch,
        "staleness": {"0": 30, "2": 10},
        "metrics": {"entropy": 1.5},
        "finished_at_ms": 1000 * number,
    } | changes
    return STEPS, factories.step_completed(number, **values)


def begun(step_target: int = 2) -> MemoryLog:
    log = made_log()
    send(log, (STEPS, factories.trainer_started(step_target=step_target)), step(1))
    return log


def evaluation() -> list[tuple[Topic, Event]]:
    answered = factories.trajectory(**EVALUATED, sample=0, reward=1.0, finished_at_ms=2500)
    return [
        (PROMPTS, factories.prompt(**EVALUATED, sample=0)),
        (PROMPTS, factories.prompt(**EVALUATED, sample=1)),
        (TRAJECTORIES, answered),
        (DEAD_LETTERS, factories.dead_letter(**EVALUATED, sample=1)),
    ]


def rows_of(log: MemoryLog) -> list[MetricsRow]:
    kept = Kept()
    read_rows(MemoryBus(log, "run"), kept, MetricRows(), follow=False)
    return kept.rows


def test_a_row_for_each_step_and_each_evaluation() -> None:
    """In the order of time, with the step's own metrics, staleness by tokens and mean reward."""
    log = begun()
    send(log, step(2), *evaluation())
    first, second, evaluated = rows_of(log)
    assert [("step", 1), ("step", 2)] == [(row.kind, row.step) for row in (first, second)]
    assert (0.5, 2, 1.5) == tuple(
        first.values[name] for name in ("staleness_mean", "staleness_max", "entropy")
    )
    assert ("evaluation", 2, 2500) == (evaluated.kind, evaluated.step, evaluated.at_ms)
    assert {
        "evaluation/dead": 1,
        "evaluation/mean_reward": 1.0,
        "evaluation/samples": 1,
    }.items() <= evaluated.values.items()
    assert rows_of(log) == [first, second, evaluated]


def test_an_evaluation_is_of_the_step_that_made_its_version() -> None:
    """Also of a version that step 1 made when it was done again."""
    log = begun()
    send(log, (STEPS, factories.redo_drifted(epoch=1, step=1, policy_version=2)))
    send(log, step(2, policy_version=3), *evaluation())
    assert [("step", 1), ("step", 2), ("evaluation", 1)] == [
        (row.kind, row.step) for row in rows_of(log)
    ]


def test_rows_show_their_best_worst_and_newest_sample() -> None:
    """Of an evaluation its own; without held-out rows each tenth step those of the version before.
    The first record of a sample counts, and tokens that are none are passed by."""
    log = begun(10)
    odd = factories.policy_segment(3, token_ids=factories.int32s(3, start=-9))
    for sample, (reward, changes) in enumerate(
        [(0.5, {}), (1.0, {}), (0.0, {}), (0.25, {}), (9.0, {"segments": (odd,)})]
    ):
        values = {"sample": sample, "reward": reward, "finished_at_ms": 3000 + sample} | changes
        send(log, (PROMPTS, factories.prompt(**EVALUATED, sample=sample)))
        send(log, (TRAJECTORIES, factories.trajectory(**EVALUATED, **values)))
        nine = {"segments": (factories.policy_segment(3, policy_version=9),)} | changes
        send(log, (TRAJECTORIES, factories.trajectory(group_id="7", **(values | nine))))
    send(log, (TRAJECTORIES, factories.trajectory(**EVALUATED, sample=0, reward=7.0)))
    send(log, *(step(number) for number in range(2, 11)))
    late = factories.trajectory(**EVALUATED, sample=9)
    wanted = [("best", "1", "1"), ("worst", "2", "0"), ("newest", "3", "0.25")]
    for has_held_out, key, group in (
        (True, "evaluation of version 2", "e2-0"),
        (False, "step 10", "7"),
    ):
        picks, kept = SamplePicks(NUMBERS, "runs/a b", has_held_out=has_held_out), Kept()
        view = MetricRows(has_held_out=has_held_out, picks=picks)
        read_rows(MemoryBus(log, "run"), kept, view, follow=False)
        (row,) = [row for row in kept.rows if row.samples and row.key == key]
        assert [(w, f"{group}/{n}", r) for w, n, r in wanted] == [
            (sample["which"], sample["sample"], sample["reward"]) for sample in row.samples
        ]
        assert f"rlstreams inspect {group}/1 'runs/a b'" == row.samples[0]["look"]
        picks.apply(late)
        assert not (picks.of((EVALUATE, 2)) if has_held_out else picks.of(("train", 9)))


def test_several_answers_to_a_row_have_a_mean_and_a_best() -> None:
    """avg@k over all answers, and the best of each row."""
    log = begun(1)
    of_version = {"purpose": EVALUATE, "group_size": 2}
    for row, rewards in enumerate(((0.0, 1.0), (0.0, 0.5))):
        for sample, reward in enumerate(rewards):
            values = {**of_version, "group_id": f"e1-{row}", "sample": sample}
            send(
                log,
                (PROMPTS, factories.prompt(**values)),
                (TRAJECTORIES, factories.trajectory(**values, reward=reward)),
            )
    evaluated = rows_of(log)[-1].values
    assert (0.375, 0.75, 4) == tuple(
        evaluated[f"evaluation/{name}"] for name in ("mean_reward", "best_reward", "samples")
    )


def test_what_does_not_count_in_the_log_is_no_row() -> None:
    """A step that came twice, and one of a trainer whose epoch was over, are passed by."""
    log = begun()
    send(log, (STEPS, factories.trainer_started(epoch=2)), step(2, epoch=1, loss=9.0))
    send(log, step(2, epoch=2, loss=1.0), step(2, epoch=2, loss=5.0))
    assert [1.0] == [row.values["loss"] for row in rows_of(log) if row.step == 2]


def test_following_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come while the run goes on; the evaluation of the last version is the last one."""
    monkeypatch.setattr(reading, "POLL_S", 0.01)
    log, kept = begun(), Kept()
    bus = MemoryBus(log, "run")
    reader = threading.Thread(
        target=lambda: read_rows(bus, kept, MetricRows(), follow=True), daemon=True
    )
    reader.start()
    assert kept.has_some.wait(60)
    assert [1] == [row.step for row in kept.rows]
    send(log, step(2), *evaluation())
    reader.join(60)
    assert not reader.is_alive()
    assert [("step", 1), ("step", 2), ("evaluation", 2)] == [(r.kind, r.step) for r in kept.rows]


def test_what_lies_in_the_log_is_read_once_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or an error says that it was not: who stops it would take the rows for complete."""
    log, kept = begun(), Kept()

    def stopped() -> bool:
        send(log, step(2))
        return True

    read_rows(MemoryBus(log, "run"), kept, MetricRows(), follow=True, stopped=stopped)
    assert [1, 2] == [row.step for row in kept.rows]
    monkeypatch.setattr(reading, "LAST_S", 0.01)
    ends = iter([{}, {Partition("steps", 0): 1000}])  # at the start, and when it is stopped
    monkeypatch.setattr(Feed, "ends", lambda _: next(ends))
    with pytest.raises(DeadlineError, match=r"steps\[0\]: at offset \d+ of 1000"):
        read_rows(MemoryBus(log, "run"), kept, MetricRows(), follow=True, stopped=lambda: True)


def test_an_evaluation_that_lacks_answers_is_the_last_row() -> None:
    """Before the run is over they may come, though a later evaluation is complete."""
    log = begun()
    send(log, step(2), *evaluation())
    for sample in (0, 1):
        early = {**EVALUATED, "group_id": "e1-0", "sample": sample}
        send(log, (PROMPTS, factories.prompt(**early)))
    send(log, (TRAJECTORIES, factories.trajectory(**early)))
    kept = Kept()
    read_rows(MemoryBus(log, "run"), kept, MetricRows(), follow=True)
    assert [2, 1] == [row.step for row in kept.rows if row.kind == "evaluation"]
    assert {1, 2} == {row.step for row in rows_of(log) if row.kind == "evaluation"}


def test_following_a_run_without_evaluation_ends_with_its_last_step() -> None:
    kept = Kept()
    read_rows(MemoryBus(begun(1), "run"), kept, MetricRows(has_held_out=False), follow=True)
    assert [1] == [row.step for row in kept.rows]


def test_a_row_has_figures_of_the_agents_whose_sessions_became_its_samples() -> None:
    """The same however the topics are read: a step waits for its sessions. One whose group was
    dropped counts nowhere, and no session is kept when its group is over."""
    log = begun(step_target=2)
    send(log, step(2, samples=(factories.sample_ref("4", 1),)), *evaluation())
    send(log, (STEPS, factories.groups_dropped(groups=(factories.dropped_group("5"),))))
    for group_id, sample, took_s in (("4", 1, 1.0), ("4", 2, 9.0), ("5", 1, 9.0), ("e2-0", 0, 3.0)):
        of = {"session_id": f"{group_id}/{sample}", "group_id": group_id, "sample": sample}
        send(log, *((CALLS, event) for event in agent_session(took_s, **of)))
    view = MetricRows(has_agents=True)
    kept = Kept()
    read_rows(MemoryBus(log, "run"), kept, view, follow=False)
    found = {row.key: {n: v for n, v in row.values.items() if "solver" in n} for row in kept.rows}
    both = {"agent/solver/sessions": 1, "agent/solver/calls": 1.0, "agent/solver/replayed": 0.0}
    assert found["step 2"].items() >= {**both, "agent/solver/latency_p95": 1.0}.items()
    told = found["evaluation of version 2"]
    assert told.items() >= {**both, "agent/solver/latency_p95": 3.0}.items()
    assert found["step 1"] == {}
    assert "agent/solver/calls" in kept.rows[1].tags
    early = MetricRows(has_held_out=False, has_agents=True)
    early.apply(factories.trainer_started(step_target=2))
    early.apply(step(1)[1])
    assert early.take(is_caught_up=False) == []
    assert [1] == [row.step for row in early.take(is_caught_up=True)]
    without = MetricRows()
    read_rows(MemoryBus(log, "run"), kept, without, follow=False)
    assert not any("agent" in name for row in kept.rows[3:] for name in row.values)


def agent_session(took_s: float, **of: Any) -> list[Event]:
    """One call that took so long."""
    asked = {name: value for name, value in of.items() if name != "sample"}
    at_ms = {"received_at_ms": NOW_MS, "finished_at_ms": NOW_MS + round(1000 * took_s)}
    return [
        session_opened(agent="solver", **of), call("c0", None, **at_ms, **asked),
        session_closed(kind="ended", **of),
    ]  # fmt: skip


def test_json_lines_and_csv_say_the_same() -> None:
    """A line a row; in the table what a row does not say is empty."""
    log = begun()
    send(log, step(2), *evaluation())
    lines, table = io.StringIO(), io.StringIO()
    for sink in (JsonLines(lines), CsvTable(table)):
        read_rows(MemoryBus(log, "run"), sink, MetricRows(), follow=False)
        sink.close()
    objects = [json.loads(line) for line in lines.getvalue().splitlines()]
    cells = list(csv.DictReader(io.StringIO(table.getvalue())))
    assert ("1970-01-01T00:00:01.000+00:00", 1.5) == (objects[0]["at"], objects[0]["entropy"])
    assert objects == [
        {
            name: value if name in ("kind", "at") else float(value)
            for name, value in row.items()
            if value
        }
        for row in cells
    ]


def test_a_scrape_has_steps_lag_staleness_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP, in the text format; all with the run's name."""
    monkeypatch.setattr(BaseServer.serve_forever, "__defaults__", (0.01,))  # looks for its end
    log = begun()
    send(log, (PROMPTS, factories.prompt(group_id="10")))
    views = Views()
    feed = Feed(MemoryBus(log, "run"), views)
    while feed.behind(feed.ends()):
        feed.poll(0.1)
    views.apply(factories.worker_report())
    state = views.state
    with (
        served("run", lambda: state, 0) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer,
    ):
        text = answer.read().decode()
    (worker,) = state.throughput.workers
    for line in (
        'rlstreams_step{run="run"} 1.0',
        'rlstreams_staleness_versions{run="run",stat="mean"} 0.5',
        'rlstreams_waiting_samples{run="run",topic="prompts"} 1.0',
        f'rlstreams_worker_state{{role="{worker.role}",run="run",state="{worker.state}",'
        f'worker="{worker.worker}"}} 1.0',
        'rlstreams_dead_letters_total{role="rollout",run="run"} 0.0',
    ):
        assert line in text.splitlines(), line
    feed.close()


def test_a_scrape_says_how_busy_each_model_server_is() -> None:
    """In flight, limit, why it moved, preemptions; nothing of a worker that has left."""
    views = Views()
    load = ServerLoad(server="http://a:1", in_flight=7, limit=9, why="preempted", num_preemptions=3)
    report = replace(factories.worker_report(), loads=(load,))
    views.apply(report)
    values = {family.name: family.values for family in families(views.state)}
    key = (report.worker, "http://a:1")
    assert ({key: 7}, {key: 9}) == (values["server_in_flight"], values["server_limit"])
    assert {(*key, "preempted"): 1} == values["server_limit_reason"]
    assert {key: 3} == values["server_preemptions"]
    views.apply(replace(report, state="stopped"))
    assert not {f.name: f.values for f in families(views.state)}["server_limit"]


def test_an_empty_run_has_figures_too() -> None:
    """Before the first step nothing divides by zero."""
    values = {family.name: family.values for family in families(Views().state)}
    assert {(): 0} == values["step"]
    assert "step_metric" not in values


def test_every_tracker_has_a_sink_and_a_section_that_begins_with_its_place() -> None:
    places = TrackSection().places
    assert sorted(SINKS) == sorted(places), "SINKS of show/track/sinks.py, TrackSection of config"
    for name, place in places.items():
        section = replace(getattr(TrackSection(), name), **{place.rpartition(".")[2]: "here"})
        assert [name] == [*TrackSection(**{name: section}).used]
    assert {} == TrackSection().used


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["metrics", "rows", DEMO, "--format", "csv", "--follow"], "follow with jsonl"),
        (
            ["metrics", "track", DEMO],
            "the section [track] names no tracker: set track.wandb.project or track.mlflow.uri or ",
        ),
    ],
)
def test_what_cannot_be_is_told_before_a_broker_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlstreams.__main__ import main

    assert 78 == main(words)
    assert said in capsys.readouterr().err


def test_rows_are_counted_and_only_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is no file named -."""
    from rlstreams.__main__ import main
    from rlstreams.cli import metrics

    log = SimpleNamespace(bus=None)
    monkeypatch.setattr(metrics, "opened_run", lambda _config: nullcontext(log))
    monkeypatch.setattr(reading, "read_rows", lambda *_, **__: 3)
    assert 0 == main(["metrics", "rows", DEMO])
    assert "3 rows\n" == capsys.readouterr().err
    assert 0 == main(["metrics", "rows", DEMO, "--out", str(tmp_path / "steps.jsonl")])
    assert f"3 rows in {tmp_path}/steps.jsonl\n" == capsys.readouterr().err
