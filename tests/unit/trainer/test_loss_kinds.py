"""What tells the losses apart, their reductions, and metrics of ratios."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rlstreams.workers.config.loss import Kind, LossSection
from rlstreams.workers.trainer.learn.loss import policy_losses, reduced
from tests.unit.trainer.test_loss import of

COUNTS = [7, 1, 30, 22]
NUM = sum(COUNTS)
Floats = npt.NDArray[np.float64]


def rows(values: Floats) -> list[Floats]:
    return np.split(values, np.cumsum(COUNTS)[:-1])


@pytest.mark.parametrize(
    ("kind", "ratio", "advantage", "is_clipped"),
    [
        ("ppo", 1.5, 1.0, True),
        ("ppo", 0.5, -1.0, True),
        ("ppo", 1.5, -1.0, False),
        ("ppo", 0.5, 1.0, False),
        ("ppo", 100.0, -1.0, True),  # the dual clip
        ("cispo", 5.0, 1.0, True),
        ("cispo", 0.1, 1.0, False),  # it has no lower bound, as in the paper
    ],
)
def test_a_clipped_token_is_counted(
    kind: Kind, ratio: float, advantage: float, is_clipped: bool
) -> None:
    """Where the ratio went too far in the direction of the advantage."""
    policy, advantages = torch.tensor([math.log(ratio)]), torch.tensor([advantage])
    losses = policy_losses(
        policy, torch.zeros(1), torch.zeros(1), advantages, [1], LossSection(kind=kind)
    )
    assert losses.is_clipped_N.tolist() == [is_clipped]


@pytest.mark.parametrize("reduce", ["token", "sequence", "constant"])
def test_shares_of_micro_batches_add_up_to_the_reduction(reduce: str) -> None:
    """Mean of tokens, mean of rows' means, or rows' sums over one length; wherever it is cut."""
    by = LossSection(reduce=reduce, constant_tokens=40 if reduce == "constant" else 0)  # type: ignore[arg-type]
    losses = np.random.default_rng(0).normal(size=NUM)
    expected = {
        "token": losses.mean(),
        "sequence": np.mean([row.mean() for row in rows(losses)]),
        "constant": losses.sum() / 40 / 6,  # two more samples are masked whole
    }[reduce]
    shares = [
        reduced(
            *of(part), counts, by, num_batch_tokens=NUM, num_batch_learnt=4, num_batch_samples=6
        )
        for part, counts in ((losses[:8], COUNTS[:2]), (losses[8:], COUNTS[2:]))
    ]
    assert float(sum(shares)) == pytest.approx(expected, rel=1e-12)
