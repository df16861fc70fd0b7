"""A loss and an advantage of one's own that compute what two of ours do."""

from __future__ import annotations

from pathlib import Path

PPO = """
import torch
from bounds import clipped


def loss(tokens, low=0.2, high=0.28, dual=3.0):
    \"\"\"PPO with a dual bound.\"\"\"
    ratios, gains = tokens.ratios(), tokens.advantages_N
    free, bounded = ratios * gains, clipped(ratios, low, high) * gains
    least, is_clipped = torch.minimum(free, bounded), bounded < free
    is_floored = (gains < 0) & (least < dual * gains)
    least = torch.where(is_floored, dual * gains, least)
    return -tokens.weights_N * least, ratios, is_clipped | is_floored
"""
BOUNDS = "def clipped(ratios, low, high):\n    return ratios.clamp(1 - low, 1 + high)\n"
CENTRED = """
def advantage(samples, scale=1.0):
    by_group = {}
    for sample in samples:
        by_group.setdefault(sample.group, []).append(sample.reward)
    return [scale * (s.reward - sum(g := by_group[s.group]) / len(g)) for s in samples]
"""
BY_TURN = CENTRED.replace("return [scale", "return [[scale").replace(
    "len(g)) for s", "len(g))] * s.num_tokens for s"
)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
