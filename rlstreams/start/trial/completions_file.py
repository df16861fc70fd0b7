"""Completions that somebody has: to test a reward alone, without a model.

A line is `{"completion": TEXT, "row": N}`, row N of `data.train` from 1, or brings its own
`prompt`, `answer` and other columns instead of `row`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlstreams.start.trial.completion import Completion, judged
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.nearest import meant_path
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.open import first_rows
from rlstreams.workers.dataset.row import Row, parse
from rlstreams.workers.prompts.issue import text_of
from rlstreams.workers.rollout.episode import answered
from rlstreams.workers.sandbox.reward import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCompletion:
    """One line of the file."""

    place: str  # file:line
    row: Row
    completion: str


def read_completions(config: RunConfig, path: Path) -> list[GivenCompletion]:
    """The file's lines.

    Raises:
        ConfigError: names file, line, and what is wrong there.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as err:
        raise ConfigError(f"--reward-only {path}: byte {err.start} is not UTF-8") from err
    except OSError as err:
        told = f"{err.strerror}{meant_path(path)}"
        raise ConfigError(f"--reward-only {path}: cannot be read: {told}") from err
    fields = [
        (f"{path}:{number}", _fields(line, f"{path}:{number}"))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not fields:
        raise ConfigError(f"--reward-only {path} has no lines")
    wanted = max((line["row"] for _, line in fields if "row" in line), default=0)
    rows = first_rows(config.data, "data.train", wanted) if wanted else []
    return [_given(place, line, rows) for place, line in fields]


def judge_completions(verifier: Verifier, given: Sequence[GivenCompletion]) -> list[Completion]:
    """Judge each as an answer that its policy ended."""
    return [
        judged(verifier, one.row, text_of(one.row.prompt), answered(one.completion))
        for one in given
    ]


def _fields(line: str, place: str) -> dict[str, Any]:
    fields = dict(parse(line, place, "--reward-only"))
    if not isinstance(fields.get("completion"), str):
        raise ConfigError(f'{place}: wanted {{"completion": TEXT, "row": N}}, got {line[:80]}')
    row = fields.get("row", 1)
    if not isinstance(row, int) or row < 1:
        raise ConfigError(f"{place}: `row` counts the rows of data.train from 1, got {row!r}")
    return fields


def _given(place: str, fields: dict[str, Any], rows: Sequence[Row]) -> GivenCompletion:
    completion = fields.pop("completion")
    if "row" not in fields:
        prompt, answer = fields.pop("prompt", ""), fields.pop("answer", "")
        text = answer if isinstance(answer, str) else json.dumps(answer)
        row = Row(number=0, place=place, prompt=prompt, answer=text, metadata=json.dumps(fields))
        return GivenCompletion(place=place, row=row, completion=completion)
    if fields["row"] > len(rows):
        raise ConfigError(f"{place}: row {fields['row']} of data.train, which has {len(rows)} rows")
    return GivenCompletion(place=place, row=rows[fields["row"] - 1], completion=completion)
