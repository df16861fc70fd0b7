"""An agent of one call whose answers have lognormal lengths: work of uneven size for `end_to_end`.

A model with random weights ends no answer, so the limit of the call is its length.
"""

from __future__ import annotations

import math
import random
from typing import Any

SIGMA = 0.8  # of the logarithm


def length_of(seed: object, mean: int, longest: int) -> int:
    """Tokens of an answer, of this mean before the cut."""
    draw = random.Random(str(seed)).lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)
    return min(longest, max(1, round(draw)))


async def answer(task: dict[str, Any], client: Any, *, mean: int, longest: int) -> float:
    """Ask once; half of the answers are right."""
    most = length_of(task["session"], mean, longest)
    asked = [{"role": "user", "content": task["prompt"]}]
    await client.chat.completions.create(model="policy", messages=asked, max_tokens=most)
    return float(random.Random(f"reward {task['session']}").random() < 0.5)
