"""What a newcomer's rows look like: which columns are problem and answer, and what kind of answer.

Guessed from the first rows by the names that data sets use; whoever calls them otherwise says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from streams.errors import ConfigError
from workers.config.data import ColumnsSection, DataSection

PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input", "messages", "text")
ANSWERS = (
    "answer", "solution", "target", "ground_truth", "reward_model.ground_truth", "label", "output",
    "response", "completion",
)  # fmt: skip
GSM8K_PATTERN = r"####\s*(.+)"  # the number behind the working, as openai/gsm8k writes it
LOOKED_AT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A data set as far as its first rows tell."""

    data: DataSection  # its columns; names the file
    is_numeric: bool  # every answer is a number
    is_chat: bool  # prompts are lists of messages
    others: Sequence[str]  # columns that go to the reward as metadata


def look(path: Path, rows: Sequence[Mapping[str, Any]], prompt: str, answer: str) -> Look:
    """Guess from `rows`; `prompt` and `answer` name columns, empty: guess.

    Raises:
        ConfigError: no row, or no column that could be it; lists what is there.
    """
    if not rows:
        raise ConfigError(f"{path} has no rows")
    prompt = prompt or _guess(path, rows, PROMPTS, "--prompt")
    answer = answer or _guess(path, rows, ANSWERS, "--answer")
    answers = [str(value_at(row, answer)) for row in rows]
    pattern = GSM8K_PATTERN if all(re.search(GSM8K_PATTERN, a) for a in answers) else ""
    if pattern:
        answers = [re.findall(pattern, a)[-1].strip() for a in answers]
    columns = ColumnsSection(
        prompt="" if prompt == "prompt" else prompt,
        answer="" if answer == "answer" else answer,
        answer_pattern=pattern,
    )
    used = {name.partition(".")[0] for name in (prompt, answer)}
    return Look(
        data=DataSection(train=str(path), columns=columns),
        is_numeric=all(is_number(a) for a in answers),
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
    found: Any = row
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _guess(path: Path, rows: Sequence[Mapping[str, Any]], names: Sequence[str], option: str) -> str:
    for name in names:
        if all(value_at(row, name) not in (None, "", []) for row in rows):
            return name
    there = ", ".join(sorted({name for row in rows for name in row})) or "none"
    raise ConfigError(
        f"{path}: none of its columns ({there}) is called {', '.join(names[:4])} or the like; "
        f"say which one it is: {option} COLUMN"
    )
