"""From what a newcomer has - a file, a data set's name, nothing - to the plan of a project."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstreams.start.project.scaffold import (
    DEMO_MODEL,
    LOOKED_AT,
    ColumnGuess,
    Plan,
    guess_columns,
    relative,
    value_at,
)
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import HUB
from rlstreams.workers.config.nearest import meant, meant_path
from rlstreams.workers.config.packaged import example
from rlstreams.workers.dataset.files import numbered_lines
from rlstreams.workers.dataset.row import parse
from rlstreams.workers.dataset.sources import first_parquet_rows, refuse_table
from rlstreams.workers.model.tokenizer import Tokenizer, TokenizerError

SMALL_MODEL = "hf:Qwen/Qwen2.5-0.5B-Instruct"
MANY_ROWS = 200  # from here on a tenth is held out
_ROOM = 16  # tokens for an answer
_CHAT = 'chat = "always" # each problem is a user message in the model\'s chat template'
_FILES = Path(__file__).with_name("files")

Rows = list[dict[str, Any]]


def from_demo(folder: Path, model: str) -> Plan:
    """Twenty sums, for somebody who has no data yet."""
    lines = [
        'train = "rows.jsonl" # a row a line: {"prompt": "7+8+3=", "answer": "18"}; put yours here',
        "held_out_rows = 4 # kept out of training, chosen by content, to evaluate on",
    ]
    return _packaged(folder, example("demo/train.jsonl"), model, lines)


def from_file(folder: Path, path: Path, model: str, prompt: str, answer: str) -> Plan:
    """Somebody's rows; `prompt` and `answer` name columns, empty: guess.

    Raises:
        ConfigError: no such file, no rows, or no column that could be the problem or the answer.
    """
    rows, count = read_rows(path)
    guess = guess_columns(path, rows, prompt, answer)
    what = "Parquet" if path.suffix == ".parquet" else "a row a line, as JSON"
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
    return Plan(
        folder=folder,
        columns=guess,
        is_small=count < MANY_ROWS,
        rows=rows,
        model=model,
        data_lines=lines,
        has_held_out=count >= 2,
    )


def from_gsm8k(folder: Path, model: str) -> Plan:
    """The data set openai/gsm8k by name; the twenty rows beside it are of its form, and ours."""
    lines = [
        'train = "hf:openai/gsm8k:main@train" # fetched from the Hugging Face hub at the first run',
        'held_out = "hf:openai/gsm8k:main@test"',
        'preset = "gsm8k" # its column names, and the number behind ####',
    ]
    if _has_template(model):
        lines += [_CHAT, 'system_prompt = "Think step by step. End with the number alone."']
    return _packaged(folder, _FILES / "word_problems.jsonl", model or SMALL_MODEL, lines)


def _packaged(folder: Path, path: Path, model: str, lines: Sequence[str]) -> Plan:
    """Rows of ours beside the project's configuration; `lines` name what it trains on."""
    rows, _ = read_rows(path)
    return Plan(
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

    Raises:
        ConfigError: names file and line.
    """
    rows: Rows = []
    count = 0
    if path.is_file():
        refuse_table(path, "--from")
        if path.suffix == ".parquet":
            return first_parquet_rows(path, "--from", LOOKED_AT)
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
        if isinstance(err, FileNotFoundError):
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
