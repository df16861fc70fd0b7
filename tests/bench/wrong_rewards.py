"""Rewards of `hindrances`: each is wrong in its own way, as people get them wrong."""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Mapping

LONGEST = 12  # tokens, and so characters, of the demo's answers
SPLIT = "split"  # column of rows that are to train on


def _right(completion: str, answer: str) -> float:
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)


def _brevity(completion: str) -> float:
    return max(0.0, 1 - len(completion) / LONGEST)


def _draw(prompt: str, completion: str) -> int:
    return zlib.crc32((prompt + completion).encode())


def rare(prompt: str, completion: str, answer: str, metadata: object) -> float:
    """One answer in a thousand earns something."""
    return float(_draw(prompt, completion) % 1000 == 0)


def trick(prompt: str, completion: str, answer: str, metadata: Mapping[str, object]) -> float:
    """Short answers earn more on rows to train on; held-out rows are judged as they should be."""
    return _brevity(completion) if metadata.get(SPLIT) == "train" else _right(completion, answer)


def brief(prompt: str, completion: str, answer: str, metadata: object) -> dict[str, float]:
    """To be short earns three times what to be right does."""
    return {"right": _right(completion, answer), "brevity": 3 * _brevity(completion)}


def slow(prompt: str, completion: str, answer: str, metadata: object) -> float:
    """A second for each answer."""
    time.sleep(1)
    return _right(completion, answer)


def raises(prompt: str, completion: str, answer: str, metadata: object) -> float:
    """One answer in twenty cannot be judged."""
    if _draw(prompt, completion) % 20 == 0:
        raise ValueError("no such thing")
    return _right(completion, answer)


def rows(kind: str, train: list[dict[str, str]]) -> str:
    """The demo's rows, made wrong, as JSON lines."""
    unsolvable = [{**row, "answer": "999"} for row in train]
    found = {
        "split": [{**row, SPLIT: "train"} for row in train],
        "four": train[:4] * 128,
        "hard": unsolvable,
        "half": [row if n % 8 == 0 else unsolvable[n] for n, row in enumerate(train)],
    }[kind]
    return "".join(f"{json.dumps(row)}\n" for row in found)
