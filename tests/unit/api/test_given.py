"""A reward and rows of a script reach other processes as files; what cannot is refused."""

from __future__ import annotations

import importlib
import json
import linecache
import math
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.up.api.given import reward_place, rows_file
from tests import factories

CELL = '''
import math as m, re
from json import loads
from fractions import Fraction as F
NUMBER = re.compile(r"-?\\d+", re.ASCII)
WEIGHTS = {"right": 1.0, "short": (0.5, None)}

class Tally:
    pass

def last(text):
    return [int(x) for x in NUMBER.findall(text)][-1]

async def reward(prompt, completion, answer, metadata, scale=m.floor(1.5)):
    """Right or wrong."""
    def is_right():
        return last(completion) == loads(answer)
    return {"right": float(F(is_right()) * scale * WEIGHTS["right"])}

def stateful(prompt, completion, answer, metadata):
    return Tally()

def unknown(prompt, completion, answer, metadata):
    return not_there(completion)

def open_file(prompt, completion, answer, metadata):
    return HANDLE.read()

class Loose(dict):
    def __missing__(self, key):
        return 0.0

API_KEY = "sk-1"
TABLE = [Loose(a=1.0)]
DEEP = []
for _ in range(100_000):
    DEEP = [DEEP]

def bonus(amount):
    def add(value):
        return value + amount
    return add

plus_one = bonus(1)
other = last

def renamed(prompt, completion, answer, metadata):
    return other(completion)

def closing(prompt, completion, answer, metadata):
    return plus_one(0)

def asking(prompt, completion, answer, metadata):
    return API_KEY

def loose(prompt, completion, answer, metadata):
    return TABLE[0]["b"]

def deep(prompt, completion, answer, metadata):
    return len(DEEP)

anonymous = lambda prompt, completion, answer, metadata: 1.0
'''


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a notebook's cell defines: in `__main__`, its source known to `linecache` alone."""
    name = "<cell 1>"
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(linecache.cache, name, (len(CELL), None, CELL.splitlines(True), name))
    main.__dict__["HANDLE"] = sys.stdin
    exec(compile(CELL, name, "exec"), main.__dict__)
    return main.__dict__


def test_a_function_of_a_notebook_takes_along_what_it_uses(
    cell: dict[str, Any], tmp_path: Path
) -> None:
    """Modules, names from modules, patterns, literals and functions; nothing else."""
    place, file = reward_place(cell["reward"], tmp_path)
    assert file is not None
    assert f"{file.path}:reward" == place
    file.write()
    made = runpy.run_path(str(file.path), run_name="elsewhere")
    coroutine = made["reward"]("1+2=", "it is 3", "3", {})
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    assert {"right": 1.0} == ended.value.value
    assert {"unknown", "HANDLE"}.isdisjoint(made)
    again, same = reward_place(cell["reward"], tmp_path)
    assert (place, file) == (again, same)


def test_a_function_of_a_module_is_named_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a package by module, so that its own imports work; alone by file."""
    assert ("tests.factories:prompt", None) == reward_place(factories.prompt, tmp_path)
    (tmp_path / "lonely.py").write_text("def right(p, c, a, m):\n    return 1.0\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    lonely = importlib.import_module("lonely")
    assert (f"{tmp_path}/lonely.py:right", None) == reward_place(lonely.right, tmp_path)


def closure() -> Callable[..., float]:
    bonus = 1.0

    def inner(prompt: str, completion: str, answer: str, metadata: object) -> float:
        return bonus

    return inner


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda _: 1.0, "<lambda> cannot be given to a run: a lambda has no name in a file"),
        (closure(), "closure.<locals>.inner .* defined inside of another function"),
        (partial(print), "partial cannot be given to a run: it is an object of partial"),
        ("unknown", "unknown .* it uses not_there, which is not defined"),
        ("stateful", "stateful .* it uses Tally, an object of type, which is not text, number, "),
        ("open_file", "open_file .* it uses HANDLE, an object of "),
        ("anonymous", "a lambda has no name"),
        ("renamed", "it uses other, which is last: call it by its own name"),
        ("closing", "it uses plus_one, which is defined inside of another function"),
        ("asking", "it uses API_KEY, by its name a secret, .*: read it from os.environ inside"),
        ("loose", "it uses TABLE, an object of list, which is not text"),
        ("deep", "it uses DEEP, an object of list, which is not text"),
    ],
)
def test_what_cannot_be_copied_is_refused_with_the_reason(
    function: Any, why: str, cell: dict[str, Any], tmp_path: Path
) -> None:
    """And with what to do instead."""
    function = cell[function] if isinstance(function, str) else function
    with pytest.raises(ConfigError, match=f"^reward: .*{why}.*; define it by `def` at the top"):
        reward_place(function, tmp_path)


def test_without_a_source_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the prompt of an interpreter that keeps none."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("def reward(p, c, a, m): return 1.0", main.__dict__)
    function = main.__dict__["reward"]
    assert isinstance(function, FunctionType)
    with pytest.raises(ConfigError, match="the source of reward is not known here"):
        reward_place(function, tmp_path)


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
