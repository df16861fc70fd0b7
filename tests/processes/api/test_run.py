"""`rlstreams.run` over a stand-in of `up`: what it is told, what it yields, how it ends."""

from __future__ import annotations

import json
import linecache
import os
import signal
import sys
import textwrap
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlstreams
from rlstreams import (
    ConfigError,
    RunConfig,
    RunFailedError,
    RunSection,
    StreamsError,
    TrainerSection,
)
from rlstreams.show.metrics.rows import EVALUATION
from rlstreams.workers.config.load import load
from tests.readme_blocks import MAKES_RUN, blocks
from tests.scripts import head

ROOT = Path(__file__).parents[3]

ROW = {
    "at": "2026-11-23T08:00:00.000+00:00", "step_target": 60, "policy_version": 7, "epoch": 1,
    "reward": 0.5, "loss": 0.1, "samples": 64, "tokens": 900, "masked_segments": 0,
    "staleness_mean": 0.75, "staleness_max": 1, "seconds": 0.4, "tokens_per_s": 1234.5,
    "entropy": 1.5,
}  # fmt: skip
ACCURACY = {"evaluation/mean_reward": 0.25, "evaluation/best_reward": 0.5, "evaluation/samples": 8}
DONE = {"kind": "end", "outcome": "complete", "problem": "", "error": ""}


def step(number: int) -> dict[str, Any]:
    return {"kind": "step", "step": number, **ROW}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes the program that is started instead of Python; it notes its arguments."""
    monkeypatch.chdir(tmp_path)

    def make(body: str) -> Path:
        program, noted = tmp_path / "python", tmp_path / "arguments.json"
        begin = f"""\
            import json, os, signal, sys, time
            json.dump(sys.argv[1:], open({str(noted)!r}, "w"))
            def say(**row): print(json.dumps(row), flush=True)
            """
        text = head("-S") + textwrap.dedent(begin) + textwrap.dedent(body)
        program.write_text(text, "utf-8")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))
        return noted

    return make


def prints(*rows: object) -> str:
    return "".join(f"say(**{row!r})\n" for row in rows)


def test_it_yields_what_up_prints(stand_in: Callable[[str], Path], tmp_path: Path) -> None:
    """Steps with types, evaluations apart; and `up` is given all in one file, which it can read."""
    evaluation = {"kind": EVALUATION, "step": 0, "at": "", "policy_version": 0, **ACCURACY}
    noted = stand_in(
        "print('page: http://127.0.0.1:9/', file=sys.stderr)\n"
        + prints(step(1), evaluation, step(2), DONE)
    )
    told: list[str] = []
    config = RunConfig(run=RunSection(id="one"), trainer=TrainerSection(groups_per_step=3))
    run = rlstreams.run(
        config, reward="rewards.py:right", dataset=[{"prompt": "1+1=", "answer": "2"}],
        loss="losses.py:mine", advantage="rloo",
        model={"path": Path("model")}, say=told.append, web=0, resume=True,
        **{"trainer.optimizer.lr": 1e-3, "reward.require_stop": False},
    )  # fmt: skip
    first, second = list(run)
    assert (1, 60, 0.5, 1234.5, {"entropy": 1.5}) == (
        first.step, first.step_target, first.reward, first.tokens_per_s, first.metrics,
    )  # fmt: skip
    assert (None, 0.25) == (first.held_out, second.held_out)
    assert "step    2/60  reward 0.500  held-out 0.250  1,234 tokens/s  staleness 0.75" == str(
        second
    )
    assert run.evaluations == [second.evaluation]
    assert ("complete", ["page: http://127.0.0.1:9/"]) == (run.outcome, told)
    words = json.loads(noted.read_text("utf-8"))
    assert ["-m", "rlstreams", "up"] == words[:3]
    given = ["--resume", "--web", "0", "--json", "--no-live", "--owner", "rlstreams.run"]
    assert given == words[4:]
    assert Path(words[3]).parent == tmp_path / "runs/one/given"
    assert 0o700 == (tmp_path / "runs/one").stat().st_mode & 0o777
    given = tomllib.loads(Path(words[3]).read_text("utf-8"))
    assert (3, 1e-3) == (given["trainer"]["groups_per_step"], given["trainer"]["optimizer"]["lr"])
    assert str(tmp_path / "model") == given["model"]["path"]
    assert f"{tmp_path}/rewards.py:right" == given["reward"]["verifier"]
    assert given["reward"]["require_stop"] is False
    learnt = given["trainer"]["loss"]
    assert (f"{tmp_path}/losses.py:mine", "rloo") == (learnt["kind"], learnt["advantage"])
    (row,) = Path(given["data"]["train"]).read_text("utf-8").splitlines()
    assert {"prompt": "1+1=", "answer": "2"} == json.loads(row)


def test_the_page_s_run_is_one(
    stand_in: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The blocks of the page as they stand there; `tests/test_readme.py` has a real run for them,
    by `make test-long`. `up` can read what it is given."""
    page = (ROOT / "infra/docs/python-api.md").read_text("utf-8")
    for block in blocks(page):
        if block.saved_as:
            (tmp_path / block.saved_as).write_text(block.text, "utf-8")
    (shown,) = [block.text for block in blocks(page) if MAKES_RUN in block.text]
    noted = stand_in(prints(step(1), step(2), DONE))
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(compile(shown, "python-api.md", "exec"), {"__name__": "__main__"})
    first, second, last = capsys.readouterr().out.splitlines()
    assert ["1", "2"] == [first.split()[0], second.split()[0]]
    assert last.startswith("complete runs/sums ")
    given = load([Path(json.loads(noted.read_text("utf-8"))[3])])
    assert ("sums", 2, 4) == (given.run.id, given.trainer.steps, given.trainer.groups_per_step)
    assert (1e-4, ()) == (given.trainer.optimizer.lr, given.demo.kills)
    assert f"{tmp_path}/grade_sum.py:reward" == given.reward.verifier
    assert 64 == len(Path(given.data.train).read_text("utf-8").splitlines())


def test_the_notebook_s_cells_go_up_to_its_log(
    stand_in: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cell after cell as a kernel does; `tests/e2e/test_notebook.py` has a real run for them. Its
    reward travels as a file, its rows as JSON lines, and `up` can read what it is given."""
    noted = stand_in(prints(step(1), step(2), DONE))
    cells = json.loads((ROOT / "infra/examples/first_run.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    *worked, reading = code
    assert "open_run(run.folder)" in reading
    compile(reading, "the last cell", "exec")
    scope: dict[str, Any] = {"__name__": "__main__"}
    for number, text in enumerate(worked):
        name = f"<cell {number}>"
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(True), name))
        exec(compile(text, name, "exec"), scope)
    assert [1, 2] == [one.step for one in scope["steps"]]
    assert "complete" == scope["run"].outcome
    words = json.loads(noted.read_text("utf-8"))
    given = load([Path(words[3])])
    assert (40, 16) == (given.trainer.steps, given.trainer.groups_per_step)
    rewards, held_out = scope["curve"].data
    assert [1, 2] == list(rewards.x)
    assert "held-out accuracy" == held_out.name
    (source,) = (tmp_path / "runs/first/given").glob("reward_*.py")
    assert "reward = pickle.loads" in source.read_text("utf-8")
    rows = Path(given.data.train).read_text("utf-8").splitlines()
    assert scope["rows"] == [json.loads(row) for row in rows]


DRAINS = """
def drain(*_):
    say(kind="end", outcome="drained", problem="", error="")
    sys.exit(0)
signal.signal(signal.SIGINT, drain)
"""
WAITS = "while True: time.sleep(0.05)\n"


def started(**more: Any) -> rlstreams.Run:
    return rlstreams.run(
        {"run": {"id": "one"}, "model": {"path": "m"}, "data": {"train": "t.jsonl"}}, **more
    )


def until(reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_leaving_the_loop_drains(stand_in: Callable[[str], Path]) -> None:
    """By `break`, by an error of the loop's body, by the end of `with`."""
    stand_in(DRAINS + prints(step(1)) + WAITS)
    run = started()
    for one in run:
        assert 1 == one.step
        break
    assert "drained" == run.outcome

    def fail(run: rlstreams.Run) -> None:
        with run:
            for one in run:
                raise ZeroDivisionError(one.step)

    run = started()
    with pytest.raises(ZeroDivisionError):
        fail(run)
    assert "drained" == run.outcome
    with started() as run:
        until(lambda: not run._steps.empty())
        assert "" == run.outcome
    assert "drained" == run.outcome


def test_ctrl_c_drains_and_a_second_one_kills(
    stand_in: Callable[[str], Path], tmp_path: Path
) -> None:
    """The loop ends with `KeyboardInterrupt`, once the last process is gone."""
    counted = tmp_path / "interrupts"
    count = f"""
def count(*_):
    open({str(counted)!r}, "a").write("x")
    if os.path.getsize({str(counted)!r}) == 2: sys.exit(0)
signal.signal(signal.SIGINT, count)
open({str(counted)!r}, "w").close()
"""
    stand_in(count + WAITS)

    def press_twice() -> None:
        until(counted.exists)
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: counted.stat().st_size == 1)
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted(run: rlstreams.Run) -> None:
        with run:
            threading.Thread(target=press_twice).start()
            list(run)

    run = started()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a fresh process
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted(run)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (2, 0) == (counted.stat().st_size, run._child.poll())


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (
            prints(DONE | {"outcome": "failed", "problem": "the run stopped: no\n  rollout-0 | x"}),
            RunFailedError, "the run stopped: no\n  rollout-0 | x",
        ),
        (
            prints(DONE | {"outcome": "failed", "problem": "a: b", "error": "ConfigError"}),
            ConfigError, "a: b",
        ),
        (
            "print('Traceback', file=sys.stderr)\nsys.exit(3)\n",
            RunFailedError, "`up` ended with 3:\nTraceback",
        ),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_raised(
    body: str, kind: type[StreamsError], message: str, stand_in: Callable[[str], Path]
) -> None:
    """With the words of `up`, by the loop, and by each `close` after it."""
    stand_in(body)
    run = started()
    for attempt in (lambda: list(run), run.close):
        with pytest.raises(kind) as raised:
            attempt()
        assert (kind, message) == (type(raised.value), str(raised.value))
    assert "failed" == run.outcome


def test_lines_that_are_no_rows_and_a_say_that_fails_end_nothing(
    stand_in: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """A library prints, a kill tears a line, the caller's own function raises."""
    stand_in(
        "print('one\\ntwo', file=sys.stderr, flush=True)\nprint('Loading ...\\n12')\n"
        + prints(step(1))
        + "print('{\"kind\": \"st', end='')\n"
    )
    told: list[str] = []

    def fail(text: str) -> None:
        told.append(text)
        raise ZeroDivisionError

    run, steps = started(say=fail), []
    with pytest.raises(RunFailedError, match=r"(?s)ended with 0:.*Loading \.\.\.\n.*12.*\"st"):
        steps.extend(one.step for one in run)
    assert ([1], ["one"]) == (steps, told)
    assert 1 == capfd.readouterr().err.count("Traceback")


def test_a_value_that_is_none_is_refused_before_anything_starts(
    stand_in: Callable[[str], Path], tmp_path: Path
) -> None:
    """The field and the value are named, and nothing is written."""
    noted = stand_in(prints(DONE))
    for more, message in (
        ({"trainer": {"stepz": 3}}, r"rlstreams.run\(\): unknown field trainer.stepz"),
        ({"trainer": {"steps": "three"}}, "trainer.steps must be a whole number, got 'three'"),
        ({"trainer": {"steps": object()}}, r"rlstreams.run\(\): trainer is no value"),
        ({"run": {"id": "a/b"}}, "run.id must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            started(**more)
    assert not noted.exists()
    assert not (tmp_path / "runs").exists()
