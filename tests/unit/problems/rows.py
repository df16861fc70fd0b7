"""Data sets for tests: files of a few rows, and a tokenizer of one token per character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlstreams.workers.config.data import DataSection
from rlstreams.workers.dataset.open import Problems, open_problems
from rlstreams.workers.dataset.row import PromptText
from rlstreams.workers.dataset.table import Dataset


class Characters:
    """One token per character; messages as JSON."""

    hash = "characters"

    def encode_prompt(self, prompt: PromptText) -> list[int]:
        return [ord(c) for c in (prompt if isinstance(prompt, str) else json.dumps(prompt))]


def write(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    """A file with these rows; a text is a line as it stands."""
    file = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_bytes("\n".join(lines).encode())
    return str(file)


def problems(longest: int | None = None, **data: Any) -> Problems:
    return open_problems(DataSection(**data), Characters(), longest)


def dataset(folder: Path, *rows: Any, **data: Any) -> Dataset:
    return problems(train=write(folder, *rows), **data).train


def everything(split: Dataset) -> list[Any]:
    """The prompts of all rows."""
    return [split.row(number).prompt for number in range(len(split))]
