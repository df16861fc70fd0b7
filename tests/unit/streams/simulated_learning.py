"""Made-up runs of small batches: rows of which some are hard, and answers that are right by chance.

An answer to a row is right with the probability `sigmoid(skill - hardness)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlstreams.streams.views.hindrance import LearningFacts
from rlstreams.streams.views.learning import Check
from tests.unit.streams.recorded_learning import point

SPREAD = 2.0  # of the rows' hardness, in logits
START, END = -0.5, 1.5  # skill at first and at last of a run that learns
SETTLED = 200.0  # steps of 16 samples, by which most is learnt
SHAPES: Mapping[str, tuple[int, int]] = {  # groups a step, samples a group
    "4": (1, 4), "4 in pairs": (2, 2), "8": (2, 4), "16": (4, 4), "16 in eights": (2, 8),
}  # fmt: skip
FAULT_AT = 400  # samples, after which a policy is lost


def run(kind: str, shape: str, seed: int, num_samples: int) -> dict[str, Any]:
    """A run as `recorded_learning.said_of` takes it.

    Args:
        kind: `learns`; `easy` learns from rows that it nearly solves; `sparse` from rows of which
            few are ever solved; `hard`: none ever is; `lost`: it learns, and after `FAULT_AT`
            samples answers are all wrong; `certain`: each row has one answer from there on.
    """
    num_groups, size = SHAPES[shape]
    draw = np.random.default_rng((seed, num_groups, size))
    shift = {"easy": 3.0, "sparse": -2.5}.get(kind, 0.0)
    hardness = draw.normal(0.0, SPREAD, 512)
    rewards, spreads, alike = [], [], []
    for done in range(0, num_samples, num_groups * size):
        skill = START + (END - START) * (1 - np.exp(-done / (16 * SETTLED))) + shift
        rows = draw.integers(0, len(hardness), num_groups)
        chances = 1 / (1 + np.exp(hardness[rows] - skill))
        if kind == "hard" or (kind == "lost" and done >= FAULT_AT):
            chances = np.zeros(num_groups)
        elif kind == "certain" and done >= FAULT_AT:
            chances = (chances > 0.5).astype(float)
        right = draw.random((num_groups, size)) < chances[:, None]
        rewards.append(float(right.mean()))
        spreads.append(float(right.std()))
        alike.append(float(np.mean(right.all(1) | ~right.any(1))))
    num = len(rewards)
    return {
        "config": {"prompts": {"group_size": size}},
        "num_samples": num_groups * size,
        "num_groups": num_groups,
        "reward": rewards,
        "metrics": {"reward_std": spreads, "equal_reward_groups": alike},
        "staleness": [1.0] * num,
        "cut": [0.0] * num,
        "dropped": [0] * num,
        "held_out": [],
        "is_accuracy": True,
    }


def named_after(
    checks: Sequence[Check], kind: str, shape: str, seed: int, num_samples: int
) -> dict[str, int]:
    """Samples after which each check first names a cause; a fault that comes later counts from
    its sample on."""
    made = run(kind, shape, seed, num_samples)
    each = made["num_samples"]
    steps = [point(made, number) for number in range(len(made["reward"]))]
    begin = FAULT_AT if kind in ("lost", "certain") else 0
    found: dict[str, int] = {}
    for done in range(max(3, begin // each + 1), len(steps) + 1):
        facts = LearningFacts(steps=steps[:done], held_out=[], measure="", cut={}, config={})
        for check in checks:
            if check.__name__ not in found and check(facts):
                found[check.__name__] = done * each
    return found
