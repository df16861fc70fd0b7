"""A reward and rows of a script reach other processes as files; what cannot is refused."""

from __future__ import annotations

import importlib
import json
import linecache
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.up.api.given import function_place, rows_file
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.trainer import OptimizerSection, TrainerSection
from rlstreams.workers.config.user_code import TRAINED_BY
from rlstreams.workers.loop.agreement import own_code
from rlstreams.workers.trainer.learn.rewarded import RewardedSample, advantages_of
from rlstreams.workers.trainer.training.made_up import made_up
from tests import factories

CELL = """
import math as m, re
from json import loads
from fractions import Fraction as F
NUMBER = re.compile(r"-?\\d+", re.ASCII)
WEIGHTS = {"right": 1.0, "short": (0.5, None)}

class Tally(dict):
    def __missing__(self, key):
        return 0.0

def last(text):
    return [int(x) for x in NUMBER.findall(text)][-1]

def right(weight):
    def is_right(completion, answer):
        return weight * (last(completion) == loads(answer))
    return is_right

graded = right(1)

async def reward(prompt, completion, answer, metadata, scale=m.floor(1.5)):
    return Tally(right=float(F(graded(completion, answer)) * scale * WEIGHTS["right"]))

def locked(prompt, completion, answer, metadata):
    return HANDLE.locked()

def loss(tokens):
    return -WEIGHTS["right"] * tokens.policy_N

def centred(samples):
    return [one.reward - WEIGHTS["short"][0] for one in samples]

def descent(parameter):
    return parameter.values - parameter.lr * parameter.gradient * WEIGHTS["short"][0], {}

API_KEY = "sk-1"
PAGE_TOKEN = "3"  # which reward does not use

def asking(prompt, completion, answer, metadata):
    return API_KEY
"""


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a notebook's cell defines: in `__main__`, its source known as IPython makes it known."""
    lines = CELL.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<cell 1>", (len(CELL), None, lines, "<cell 1>"))
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.__dict__["HANDLE"] = threading.Lock()
    exec(compile(CELL, "<cell 1>", "exec"), main.__dict__)
    return main.__dict__


def test_a_function_of_a_notebook_takes_along_what_it_uses(
    cell: dict[str, Any], tmp_path: Path
) -> None:
    """Modules, names from modules, values, functions, also inner ones, and classes."""
    place, file = function_place("reward", cell["reward"], tmp_path)
    assert f"{file.path}:reward" == place
    file.write()
    asks = (
        "import asyncio, runpy, sys; made = runpy.run_path(sys.argv[1]); "
        "print(asyncio.run(made['reward']('1+2=', 'it is 3', '3', {})))"
    )
    words = [sys.executable, "-c", asks, str(file.path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "{'right': 1.0}\n" == done.stdout
    assert "#   async def reward(prompt," in file.text, "for people"
    again, same = function_place("reward", cell["reward"], tmp_path)
    assert (place, file) == (again, same)


def test_functions_of_a_notebook_that_train_are_what_a_trainer_can_call(
    cell: dict[str, Any], tmp_path: Path
) -> None:
    """By the text that its claim records."""
    places: dict[str, str] = {}
    for stem, name in (("loss", "loss"), ("advantage", "centred"), ("optimizer", "descent")):
        places[stem], file = function_place(stem, cell[name], tmp_path)
        file.write()
    by = LossSection(kind=places["loss"], advantage=places["advantage"])
    trainer = TrainerSection(loss=by, optimizer=OptimizerSection(kind=places["optimizer"]))
    code = own_code(RunConfig(trainer=trainer))
    assert sorted(TRAINED_BY) == sorted(key.partition(": ")[0] for key in code)
    assert len(TRAINED_BY) == len(made_up(trainer, 4, [], code))
    samples = [RewardedSample.of(factories.trajectory(), reward) for reward in (1.0, 0.0)]
    assert [0.5, -0.5] == list(advantages_of(samples, by, code).of_samples)


def test_a_function_of_a_module_is_named_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a package by module, so that its own imports work; alone by file."""
    assert ("tests.factories:prompt", None) == function_place("reward", factories.prompt, tmp_path)
    (tmp_path / "lonely.py").write_text("def right(p, c, a, m):\n    return 1.0\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    lonely = importlib.import_module("lonely")
    assert (f"{tmp_path}/lonely.py:right", None) == function_place("reward", lonely.right, tmp_path)


def test_what_cannot_be_copied_is_refused_with_the_reason(
    cell: dict[str, Any], tmp_path: Path
) -> None:
    """A lock, and a secret, by its name."""
    with pytest.raises(ConfigError, match=r"^reward: locked cannot be given to a run: .*pickle"):
        function_place("reward", cell["locked"], tmp_path)
    with pytest.raises(ConfigError, match=r"^reward: asking .* API_KEY, by its name a secret, "):
        function_place("reward", cell["asking"], tmp_path)


class Frame:
    """As much of a pandas DataFrame as tells it from a list: it iterates over its columns."""

    columns = ("prompt",)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def to_dict(self, orient: str) -> list[dict[str, str]]:
        assert "records" == orient
        return [{"prompt": "a"}]


@pytest.mark.parametrize("table", [Frame(), pyarrow.table({"prompt": ["a"]})])
def test_a_table_is_taken_by_its_rows(tmp_path: Path, table: Any) -> None:
    """Of pandas and of pyarrow."""
    assert rows_file([{"prompt": "a"}], tmp_path).text == rows_file(table, tmp_path).text


def test_rows_become_json_lines_or_are_refused_by_number(tmp_path: Path) -> None:
    """A row is a dict that JSON can hold."""
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "é", "answer": 3}]
    file = rows_file(iter(rows), tmp_path)
    file.write()
    assert rows == [json.loads(line) for line in file.path.read_text("utf-8").splitlines()]
    with pytest.raises(ConfigError, match=r"dataset: row 1 cannot be written as JSON: .*set"):
        rows_file([{"prompt": "a"}, {"prompt": {1}}], tmp_path)
    with pytest.raises(ConfigError, match="dataset: row 0 must be a dict, got str"):
        rows_file(["1+1="], tmp_path)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="row 0 cannot be written as JSON"):
        rows_file([{"prompt": math.nan}], tmp_path)
