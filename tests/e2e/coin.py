"""A verifier that flips a coin over what is trained on, and judges only the held-out rows.

The control of the learning test: with rewards that say nothing nothing is learned. Shuffling the
rewards inside each batch would say the same, but no setting does that, and none should.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

_HELD_OUT = {
    json.loads(line)["prompt"]
    for line in (Path(__file__).parents[2] / "infra/examples/demo/held_out.jsonl")
    .read_text("utf-8")
    .splitlines()
}
_rng = random.Random(0)


def judge(prompt: str, completion: str, answer: str, metadata: dict[str, object]) -> float:
    """1 or 0."""
    if prompt not in _HELD_OUT:
        return float(_rng.random() < 0.5)
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))
