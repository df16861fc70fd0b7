"""Makes a project that runs as it is, from a file, a data set's name, or nothing.

Columns are guessed from the first rows, by the names that data sets use. The project has a
configuration, a reward with its test, twenty rows, a README, perhaps a model; no file is
overwritten.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from rlstreams.check.project.columns import ColumnGuess, guess_columns, value_at
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import GYM, HUB, DataSection, GymSection
from rlstreams.workers.config.here import CONFIG_FILE
from rlstreams.workers.config.nearest import meant, meant_path
from rlstreams.workers.config.packaged import example
from rlstreams.workers.dataset.files import numbered_lines
from rlstreams.workers.dataset.row import parse
from rlstreams.workers.dataset.sources import (
    SEPARATORS,
    first_parquet_rows,
    numbered_rows,
    source_of,
)
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.folder import read_config, token_limit
from rlstreams.workers.model.tokenizer import Tokenizer, TokenizerError

LOOKED_AT = 20
ROWS = 20
_ON_ONE = {  # lines of run.toml for two GPUs, and those for one
    'CUDA_VISIBLE_DEVICES = "1" # if there is one GPU: "0"': 'CUDA_VISIBLE_DEVICES = "0"',
    'channel = "nccl" # from one GPU to another': 'channel = "nccl" # on one card by CUDA IPC',
    "gpu-memory-utilization = 0.85 # of that GPU; if there is one: 0.3, the other roles "
    "need the rest":
        "gpu-memory-utilization = 0.3 # must be free as the server starts\n"
        "kv-cache-memory-bytes = 4_000_000_000 # not measured, because the other roles allocate "
        "meanwhile",
}  # fmt: skip
DEMO_MODEL = "demo/model"
LONGEST = 4096  # tokens, as run.toml has it
_FILES = Path(__file__).with_name("files")
_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectPlan:
    """A project to be written."""

    folder: Path
    columns: ColumnGuess
    is_small: bool  # few rows to train on
    rows: Sequence[Mapping[str, Any]]  # the first ones, as they are
    model: str  # empty: the demo's, copied into the project
    data_lines: Sequence[str]  # of [data]
    has_held_out: bool
    num_gpus: int = 0  # that run.toml is for; 0: none, with lines for two as comments
    gym: str = ""  # task of reasoning-gym, which brings its own reward
    has_agent: bool = False  # a program that calls the model makes the answers


def write(plan: ProjectPlan) -> list[Path]:
    """Write the project; the files, in the order in which to look at them.

    Raises ConfigError: the folder is there and not empty, or cannot be written.
    """
    folder = plan.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not empty; name a folder that is not")
    values = {
        "run_id": run_id(folder),
        "data": "\n".join(_data_lines(plan)),
        "is_small": plan.is_small,
        "has_held_out": plan.has_held_out,
        "num_gpus": plan.num_gpus,
        "has_agent": plan.has_agent,
        "verifier": "reasoning-gym" if plan.gym else "reward.py:reward",
    }
    texts = {
        CONFIG_FILE: _for_gpus(
            _filled("run.toml", model=plan.model and json.dumps(plan.model), **values),
            plan.num_gpus,
            _longest(plan),
        ),
        **_agent(plan),
        **_reward(plan),
        "rows.jsonl": "".join(f"{json.dumps(row)}\n" for row in _rows_as_rewarded(plan)),
        "README.md": _filled("README.md", model=plan.model, **values),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        if not plan.model:
            shutil.copytree(example(DEMO_MODEL), folder / "model")
    except OSError as err:
        raise ConfigError(f"{folder} cannot be written: {err}") from err
    return [folder / name for name in texts] + ([] if plan.model else [folder / "model"])


def _longest(plan: ProjectPlan) -> int:
    """Longest sequence of a server in tokens: `LONGEST`, or less if the model's folder says so."""
    try:
        return min(LONGEST, token_limit(read_config(plan.folder / plan.model)))
    except EngineError:  # the hub's, of which nothing is fetched here
        return LONGEST


def _for_gpus(text: str, num_gpus: int, longest: int) -> str:
    """Fit the lines for GPUs to their number: the server has the second of two, or shares one."""
    if not num_gpus:
        return text
    text = re.sub(r"(?m)^#gpu ", "", text)
    text = text.replace(f"max-model-len = {LONGEST}", f"max-model-len = {longest}")
    if num_gpus == 1:
        for two, one in _ON_ONE.items():
            assert two in text, "the template has a line for two GPUs"
            text = text.replace(two, one)
    return text


def _data_lines(plan: ProjectPlan) -> list[str]:
    """Lines of [data]; an agent writes its messages itself, so it has no lines about them."""
    own = ("chat = ", "system_prompt = ") if plan.has_agent else ()
    return [line for line in plan.data_lines if not line.startswith(own)]


def _agent(plan: ProjectPlan) -> dict[str, str]:
    """The agent and its test, by file; none where there is none."""
    names = ("solver.py", "test_solver.py") if plan.has_agent else ()
    return {name: _text(f"{name}.tmpl") for name in names}


def _reward(plan: ProjectPlan) -> dict[str, str]:
    """The reward function and its test, by file; none where the data set brings a scorer."""
    if plan.gym:
        return {}
    kind = "numeric" if plan.columns.is_numeric else "exact"
    kind = kind if plan.columns.has_answers else "alone"
    test = _filled("test_reward.py.tmpl", has_answers=plan.columns.has_answers)
    return {"reward.py": _text(f"{kind}.py.tmpl"), "test_reward.py": test}


def run_id(folder: Path) -> str:
    """The folder's name as far as it can be a run id."""
    return _NOT_IN_AN_ID.sub("-", folder.absolute().name).strip("-")[:100] or "run"


def relative(path: Path, folder: Path) -> str:
    """Name of `path` in a file of `folder`: relative if it is near, so that both can move."""
    near = os.path.relpath(path.absolute(), folder.absolute())
    return near if near.count("..") <= 1 else str(path.absolute())


def _rows_as_rewarded(plan: ProjectPlan) -> list[dict[str, Any]]:
    """Problem and answer under our names; an answer that ends in `#### x` is x."""
    columns = plan.columns.data.columns
    pattern = re.compile(columns.answer_pattern) if columns.answer_pattern else None
    found = []
    for row in plan.rows[:ROWS]:
        answer = value_at(row, columns.answer or "answer") if plan.columns.has_answers else ""
        text = answer if isinstance(answer, str) else json.dumps(answer)
        match = pattern.search(text) if pattern else None
        found.append(
            {
                "prompt": value_at(row, columns.prompt or "prompt"),
                "answer": match.group(1).strip() if match else text,
            }
        )
    return found


def _text(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _filled(name: str, **values: object) -> str:
    text, undefined = _text(name), StrictUndefined
    template = Template(text, trim_blocks=True, keep_trailing_newline=True, undefined=undefined)
    filled: str = template.render(values)
    return filled


SMALL_MODEL = "hf:Qwen/Qwen2.5-0.5B-Instruct"
MANY_ROWS = 200  # from here on a tenth is held out
_ROOM = 16  # tokens for an answer
_CHAT = 'chat = "always" # each problem is a user message in the model\'s chat template'
_FILES = Path(__file__).with_name("files")

Rows = list[dict[str, Any]]


def from_demo(folder: Path, model: str) -> ProjectPlan:
    """Twenty sums, for a user without data."""
    lines = [
        'train = "rows.jsonl" # a row a line: {"prompt": "7+8+3=", "answer": "18"}; put yours here',
        "held_out_rows = 4 # kept out of training, chosen by content, to evaluate on",
    ]
    return _packaged(folder, example("demo/train.jsonl"), model, lines)


def from_file(folder: Path, path: Path, model: str, prompt: str, answer: str) -> ProjectPlan:
    """The user's own rows; `prompt` and `answer` name columns, empty: guess.

    Raises ConfigError: no such file, no rows, or no column that could be the problem or the answer.
    """
    rows, count = read_rows(path)
    guess = guess_columns(path, rows, prompt, answer)
    kinds = {".parquet": "Parquet", ".csv": "a table", ".tsv": "a table"}
    what = kinds.get(path.suffix.lower(), "a row a line, as JSON")
    lines = [f"train = {json.dumps(relative(path, folder))} # {what}"]
    if count >= MANY_ROWS:
        lines.append("held_out_fraction = 0.1 # kept out of training, chosen by content")
    elif count >= 2:
        lines.append(f"held_out_rows = {max(1, count // 5)} # kept out of training, by content")
    is_small = not model and _demo_can_write(guess, rows)
    if not is_small and not guess.is_chat and _has_template(model):
        lines.append(_CHAT)
    lines += _column_lines(guess)
    model = model if model or is_small else SMALL_MODEL
    return ProjectPlan(
        folder=folder,
        columns=guess,
        is_small=count < MANY_ROWS,
        rows=rows,
        model=model,
        data_lines=lines,
        has_held_out=count >= 2,
    )


def from_gsm8k(folder: Path, model: str) -> ProjectPlan:
    """The data set openai/gsm8k by name; the twenty rows beside it are of its form, and ours."""
    lines = [
        'train = "hf:openai/gsm8k:main@train" # fetched from the Hugging Face hub at the first run',
        'held_out = "hf:openai/gsm8k:main@test"',
        'preset = "gsm8k" # its column names, and the number behind ####',
    ]
    if _has_template(model):
        lines += [_CHAT, 'system_prompt = "Think step by step. End with the number alone."']
    return _packaged(folder, _FILES / "word_problems.jsonl", model or SMALL_MODEL, lines)


def from_gym(folder: Path, task: str, model: str) -> ProjectPlan:
    """A task of reasoning-gym, which makes its rows and judges answers to them.

    Raises ConfigError: the package is not installed, or has no such task.
    """
    data = DataSection(train=f"{GYM}{task}", gym=GymSection(rows=ROWS))
    made = numbered_rows(source_of(data, "data.train", "--from"), ())
    rows = [parse(line, f"row {number}", "--from") for number, line in made]
    lines = [
        f"train = {json.dumps(data.train)} # made by reasoning-gym, and judged by it",
        "held_out_rows = 64 # kept out of training, chosen by content, to evaluate on",
    ]
    if _has_template(model):
        lines += [_CHAT, 'system_prompt = "Think step by step. End with the answer alone."']
    lines += ["", "[data.gym]", "rows = 2000", "seed = 0", "# options = {} # of the task"]
    return ProjectPlan(
        folder=folder, columns=guess_columns(Path(data.train), rows, "", ""), is_small=False,
        rows=rows, model=model or SMALL_MODEL, data_lines=lines, has_held_out=True, gym=task,
    )  # fmt: skip


def _packaged(folder: Path, path: Path, model: str, lines: Sequence[str]) -> ProjectPlan:
    """Rows of ours beside the project's configuration; `lines` name what it trains on."""
    rows, _ = read_rows(path)
    return ProjectPlan(
        folder=folder,
        columns=guess_columns(Path("rows.jsonl"), rows, "", ""),
        is_small=True,
        rows=rows,
        model=model,
        data_lines=lines,
        has_held_out=True,
    )


def read_rows(path: Path) -> tuple[Rows, int]:
    """The first rows of a file of JSON lines or Parquet, and how many there are.

    Raises ConfigError: names file and line.
    """
    rows: Rows = []
    count = 0
    if path.is_file() and path.suffix == ".parquet":
        return first_parquet_rows(path, "--from", LOOKED_AT)
    if path.is_file() and path.suffix.lower() in SEPARATORS:
        found = numbered_rows(source_of(DataSection(train=str(path)), "data.train", "--from"), ())
        lines = [parse(line, f"{path}: row {number}", "--from") for number, line in found]
        return lines[:LOOKED_AT], len(lines)
    try:
        with path.open("rb") as file:
            for number, line in numbered_lines(file, f"--from {path}"):
                if line.isspace():
                    continue
                count += 1
                if len(rows) < LOOKED_AT:
                    rows.append(parse(line, f"{path}:{number}", "--from"))
    except OSError as err:
        near = ""
        if isinstance(err, FileNotFoundError) and str(path).startswith(HUB):
            near = ": of the hub only gsm8k can be begun with; load others with `datasets`, write "
            near += "them by to_json(), and name that file"
        elif isinstance(err, FileNotFoundError):
            near = meant(str(path), ("demo", "gsm8k")) or meant_path(path)
        raise ConfigError(f"--from {path}: cannot be read: {err.strerror}{near}") from err
    return rows, count


def _has_template(model: str) -> bool:
    """Whether the model can be given messages; of the hub's it is assumed, none is fetched here."""
    if not model or model.startswith(HUB):
        return True
    try:
        Tokenizer.load(Path(model)).apply_chat_template([{"role": "user", "content": "1+1="}])
    except TokenizerError:
        return False
    return True


def _column_lines(guess: ColumnGuess) -> list[str]:
    columns = guess.data.columns
    named = {
        "prompt": columns.prompt,
        "answer": columns.answer,
        "answer_pattern": columns.answer_pattern,
    }
    lines = [f"{name} = {_toml(value)}" for name, value in named.items() if value]
    return ["", "[data.columns]", *lines] if lines else []


def _toml(text: str) -> str:
    return f"'{text}'" if "\\" in text else json.dumps(text)


def _demo_can_write(guess: ColumnGuess, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the demo's tokenizer has all that stands in the rows."""
    if guess.is_chat:
        return False
    folder = example(DEMO_MODEL)
    tokenizer = Tokenizer.load(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    unknown = tokenizer.encode("\0")
    columns = guess.data.columns
    for row in rows:
        prompt = tokenizer.encode(str(value_at(row, columns.prompt or "prompt")))
        answer = tokenizer.encode(str(value_at(row, columns.answer or "answer")))
        too_long = len(prompt) + _ROOM > int(config["max_position_embeddings"])
        if too_long or set(unknown) & {*prompt, *answer}:
            return False
    return True
