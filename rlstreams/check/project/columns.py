"""Guesses the columns of problem and answer in a data set, by its first rows. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import ColumnsSection, DataSection
from rlstreams.workers.dataset.row import brief

PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input", "messages", "text")
ANSWERS = (
    "answer", "solution", "target", "ground_truth", "reward_model.ground_truth", "label", "output",
    "response", "completion",
)  # fmt: skip
GSM8K_PATTERN = r"####\s*(.+)"  # the number behind the working, as openai/gsm8k writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnGuess:
    """The columns of a data set, as guessed from its first rows."""

    data: DataSection  # its columns; names the file
    is_numeric: bool  # every answer is a number
    is_chat: bool  # prompts are lists of messages
    others: Sequence[str]  # columns that go to the reward as metadata
    has_answers: bool = True  # else rows are prompts alone, and the reward judges without one


def guess_columns(
    path: Path, rows: Sequence[Mapping[str, Any]], prompt: str, answer: str
) -> ColumnGuess:
    """Guess from `rows`; `prompt` and `answer` name columns, empty: guess.

    Raises ConfigError: no row, or no column that could be it; lists what is there.
    """
    if not rows:
        raise ConfigError(f"{path} has no rows")
    for option, name in (("--prompt", prompt), ("--answer", answer)):
        if name and all(value_at(row, name) is None for row in rows):
            raise ConfigError(
                f"{option} {name}: {path} has no such column; the first row: {_shown(rows[0])}"
            )
    prompt, answer = prompt or _guess(rows, PROMPTS), answer or _guess(rows, ANSWERS)
    others = {name for row in rows for name in row} - {prompt}
    if not prompt or (others and not answer):
        raise ConfigError(_unknown(path, rows, prompt, answer))
    answers = [str(value_at(row, answer)) for row in rows if answer]
    is_gsm8k = answers and all(re.search(GSM8K_PATTERN, a) for a in answers)
    pattern = GSM8K_PATTERN if is_gsm8k else ""
    if pattern:
        answers = [re.findall(pattern, a)[-1].strip() for a in answers]
    columns = ColumnsSection(
        prompt="" if prompt == "prompt" else prompt,
        answer="" if answer == "answer" else answer,
        answer_pattern=pattern,
    )
    used = {name.partition(".")[0] for name in (prompt, answer)}
    return ColumnGuess(
        data=DataSection(train=str(path), columns=columns),
        is_numeric=bool(answers) and all(is_number(a) for a in answers),
        has_answers=bool(answer),
        is_chat=any(isinstance(value_at(row, prompt), list) for row in rows),
        others=sorted({name for row in rows for name in row} - used),
    )


def is_number(text: str) -> bool:
    """Whether a numeric verifier can compare with it."""
    try:
        return Decimal(text.strip()).is_finite()
    except InvalidOperation:
        return False


def value_at(row: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    """`a.b` is field `b` of column `a`; None: there is none."""
    if name in row:
        return row[name]
    found: Any = row
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _guess(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """The first of `names` that every row has; "" if there is none."""
    for name in names:
        if all(value_at(row, name) not in (None, "", []) for row in rows):
            return name
    return ""


def _unknown(path: Path, rows: Sequence[Mapping[str, Any]], prompt: str, answer: str) -> str:
    """The message that asks for the missing column names, with the first row to find them in."""
    there = ", ".join(sorted({name for row in rows for name in row})) or "none"
    kinds = [("problem", "--prompt", PROMPTS, prompt), ("answer", "--answer", ANSWERS, answer)]
    missing = [kind for kind in kinds if not kind[-1]]
    wanted = ", nor ".join(
        f"{', '.join(names[:4])} or the like (the {what})" for what, _, names, _ in missing
    )
    options = " ".join(f"{option} COLUMN" for _, option, _, _ in missing)
    them = "it" if len(missing) == 1 else "them"
    return (
        f"{path}: none of its columns ({there}) is called {wanted}; "
        f"name {them}: {options}; the first row: {_shown(rows[0])}"
    )


def _shown(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {brief(value)}" for name, value in row.items()) or "empty"
