"""Trackers with their own libraries, none of which reaches a network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.show.track import tracker as module
from rlstreams.show.track.sinks import TensorBoardSink, records
from rlstreams.streams.log.errors import ConfigError
from tests.contract.polling import within
from tests.processes.track import made_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
WAIT_S = 120.0
ROOT = Path(__file__).resolve().parents[3]
Point = tuple[str, int, float]  # name, step, value


def tensorboard(folder: Path) -> list[Point]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tb/demo"))
    found.Reload()
    points = [(t, e.step, e.value) for t in found.Tags()["scalars"] for e in found.Scalars(t)]
    assert {"samples/text_summary", "samples"} & set(found.Tags()["tensors"])
    assert {e.wall_time - e.step for e in found.Scalars("step/reward")} == {0.0}  # the log's
    return points


def mlflow(folder: Path) -> list[Point]:
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(tracking_uri=f"file:{folder}/mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    assert ("demo", "FINISHED") == (run.info.run_name, run.info.status)
    names = {f.path for f in client.list_artifacts(run.info.run_id, "samples")}
    assert {f"samples/evaluation-of-version-{step}.json" for step in (10, 20, 30)} == names
    return [
        (metric, point.step, point.value)
        for metric in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, metric)
    ]


def wandb(folder: Path) -> list[Point]:
    from wandb.proto.wandb_internal_pb2 import Record

    points, steps, ends = [], Counter[int](), []
    for path in sorted((folder / "track").glob("wandb/offline-run-*-demo-1/*.wandb")):
        found = [Record.FromString(data) for data in records(path.read_bytes())]
        ends += [found[-1].WhichOneof("record_type")] if found else []
        for history in (r.history for r in found if r.WhichOneof("record_type") == "history"):
            row = {i.nested_key[0]: json.loads(i.value_json) for i in history.item}
            steps[row["_step"]] += 1
            points += [(n, row["optimizer_step"], v) for n, v in row.items() if "/" in n]
    assert "exit" == ends[-1]  # the reader came to the end of a file that was closed
    assert set(steps.values()) == {1}
    assert list(steps) == list(range(len(made_rows.rows())))
    return points


def trackio(folder: Path) -> list[Point]:
    program = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s;"
        "print(json.dumps(s.get_logs('p', 'demo-1')))"
    )
    given = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    words = [sys.executable, "-c", program]
    said = subprocess.run(words, env=given, capture_output=True, check=True).stdout
    rows = json.loads(said.splitlines()[-1])
    return [(n, row["step"], v) for row in rows for n, v in row.items() if "/" in n]


@pytest.mark.parametrize(
    "kills", [(12,), pytest.param((5, 12, 20), marks=pytest.mark.slow)], ids=["once", "thrice"]
)
def test_each_row_is_written_once_by_trackers_that_are_killed(
    tmp_path: Path, kills: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whatever their libraries were about to write; each tracker is read by its own reader."""
    monkeypatch.setattr(module, "PAUSE_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said: list[str] = []
    names = made_rows.settings(tmp_path)
    words = [sys.executable, made_rows.__file__, str(tmp_path)]
    commands = {name: [*words, name, *map(str, kills)] for name in names}
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):  # nobody may write there
        monkeypatch.setenv(name, "/dev/null/home")
    assert [] == module.keep(commands, said.append, lambda: False, tries=len(kills) + 3), said
    killed = "its process was ended by SIGKILL; what it lacks waits"
    assert sorted(f"{name}: {killed}" for name in names for _ in kills) == sorted(said)
    wanted = sorted((n, r.step, v) for r in made_rows.rows() for n, v in r.tags.items())
    readers: tuple[Callable[[Path], list[Point]], ...] = (tensorboard, mlflow, wandb, trackio)
    for reader in readers:
        assert wanted == sorted(reader(tmp_path)), reader.__name__


HANGS = """
import sys, time
from rlstreams.show.track import tracker
tracker.DEADLINE_S = 1
with tracker.deadline():
    time.sleep(600)
"""


def test_one_that_hangs_or_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended at its deadline and tried again; a finished log not for ever."""
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done, said = tmp_path / "done", list[str]()
    scripts = {"hangs": HANGS, "fails": "raise SystemExit(3)", "works": f"open({str(done)!r}, 'w')"}
    commands = {name: [sys.executable, "-c", script] for name, script in scripts.items()}
    lacking = module.keep(commands, said.append, lambda: False, tries=2)
    assert (["fails", "hangs"], True) == (lacking, done.exists())
    assert 2 <= said.count("hangs: its process was ended by SIGALRM; what it lacks waits")
    assert 2 <= said.count("fails: its process failed (exit 3); what it lacks waits")


def test_who_is_stopped_lets_them_finish_and_waits_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not heed it lacks rows, and is gone."""
    monkeypatch.setattr(module, "CLOSE_S", 1.0)
    heeds = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); "
    rest = f"import pathlib, time; pathlib.Path({str(tmp_path)!r}, %r).touch(); time.sleep(600)"
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); "
    commands = {
        "heeds": [sys.executable, "-c", heeds + rest % "heeds"],
        "deaf": [sys.executable, "-c", deaf + rest % "deaf"],
    }

    def both_run() -> bool:
        return all((tmp_path / name).exists() for name in commands)

    assert ["deaf"] == module.keep(commands, print, both_run)


def test_files_of_another_run_are_refused_and_rows_that_are_there_passed_by(tmp_path: Path) -> None:
    """A folder belongs to one run, which may be written again."""
    folder, about = {"folder": str(tmp_path / "tb/{id}")}, made_rows.about(tmp_path)
    for _ in range(2):
        sink = TensorBoardSink(folder, about)
        sink.write(made_rows.rows())
        sink.close()
    assert len(tensorboard(tmp_path)) == sum(len(row.tags) for row in made_rows.rows())
    with pytest.raises(ConfigError, match="has event files of run demo-1, and demo-2 would be"):
        TensorBoardSink(folder, replace(about, identity="demo-2"))


def test_a_tracker_hears_that_its_up_was_killed(tmp_path: Path) -> None:
    """By its standard input, which `up` kept open; it would lock out the tracker of the next."""
    program, ended = tmp_path / "python", tmp_path / "ended"
    program.write_text(f'#!/bin/sh\ncat\necho "$@" > {ended}.part\nmv {ended}.part {ended}\n')
    program.chmod(0o700)
    (tmp_path / "logs").mkdir()
    killed = (
        "import os, pathlib, sys; from rlstreams.show.web.beside import trackers\n"
        f"sys.executable = {str(program)!r}\n"
        f"with trackers(pathlib.Path({str(tmp_path)!r}), ['wandb'], print, print):\n"
        f"    print(os.path.exists({str(ended)!r}), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", killed], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert (-signal.SIGKILL, "False") == (done.returncode, done.stdout.split()[-1])
    within(WAIT_S, lambda: ended.exists() or None, "the tracker's end")
    assert f"-m rlstreams metrics track {tmp_path} --follow --owner up\n" == ended.read_text()
