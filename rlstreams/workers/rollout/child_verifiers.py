"""Verifiers that may hang or need an extra library: they run like user functions.

Loaded by path in a child process (`sandbox/program.py`), so this file imports nothing of ours.
Each is called with (prompt, completion, answer, metadata) and its options by keyword.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Metadata = dict[str, Any]

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def pattern(
    prompt: str, completion: str, answer: str, metadata: Metadata, *, pattern: str = ""
) -> float:
    """A regular expression: 1 if it is found, and its first group, if it has one, is the answer.

    Args:
        pattern: of all rows; of several places where it is found the last counts. Empty: the
            row's answer is the pattern.
    """
    del prompt, metadata
    found = list(re.finditer(pattern or answer, completion))
    if not found:
        return 0.0
    if not pattern or found[-1].re.groups == 0:
        return 1.0
    return float((found[-1].group(1) or "").strip() == answer.strip())


def math_verify(prompt: str, completion: str, answer: str, metadata: Metadata) -> float:
    """1 if answer and completion are the same mathematics, by the package `math-verify`.

    Its own time limits are off: this process has one.
    """
    del prompt, metadata
    from math_verify import parse, verify  # type: ignore[attr-defined,unused-ignore]

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each limit that is off
    wanted = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    if not wanted:
        raise ValueError(f"the row's answer {answer!r} is no mathematics that math-verify reads")
    said = parse(completion, parsing_timeout=None)
    return float(verify(wanted, said, timeout_seconds=None))


def reasoning_gym(
    prompt: str, completion: str, answer: str, metadata: Metadata, *, task: str = ""
) -> float:
    """The task's own score, by the package `reasoning-gym`.

    Args:
        task: its name; empty: the row's `source_dataset`, which rows of `gym:TASK` have.
    """
    made = metadata.get("gym", metadata)  # rows of `gym:TASK` keep the task's own fields there
    name = task or made.get("source_dataset", "")
    if not name:
        raise ValueError("the row has no `source_dataset`: set reward.options.task")
    said = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    entry = {"question": prompt, "answer": answer, "metadata": made}
    return float(_scorer(name)(said[-1].strip() if said else completion.strip(), entry))


def json_schema(
    prompt: str,
    completion: str,
    answer: str,
    metadata: Metadata,
    *,
    schema: dict[str, Any] | None = None,
    schema_file: str = "",
) -> tuple[float, dict[str, float]]:
    """1 if the completion, or its last fenced block, is JSON that the schema admits.

    Args:
        schema: of all rows.
        schema_file: the same as a file; with neither, the row's answer is the schema.
    """
    del prompt, metadata
    text = schema_file and _text(schema_file)
    validator = _validator(json.dumps(schema) if schema is not None else text or answer)
    blocks = _FENCED.findall(completion)
    try:
        said = json.loads(blocks[-1] if blocks else completion)
    except ValueError:
        return 0.0, {"parsed": 0.0}
    return float(validator.is_valid(said)), {"parsed": 1.0}


@functools.cache
def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


@functools.cache
def _scorer(name: str) -> Callable[..., float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # in the sources of what it builds on
        from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)  # type: ignore[no-any-return,unused-ignore]


@functools.lru_cache(maxsize=64)
def _validator(schema: str) -> Any:  # noqa: ANN401
    from jsonschema.validators import validator_for

    loaded = json.loads(schema)
    kind = validator_for(loaded)
    kind.check_schema(loaded)
    return kind(loaded)
