"""What tells the losses apart, their reductions, and metrics of ratios."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rlstreams.workers.config.loss import Kind, LossSection
from rlstreams.workers.model.token_scores import TokenScores
from rlstreams.workers.trainer.learn.loss import policy_losses, reduced
from rlstreams.workers.trainer.learn.loss_totals import LossSums
from tests.unit.trainer.test_loss import of, random_tokens

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


def test_a_token_far_off_keeps_its_gradient_in_its_sequence() -> None:
    """GSPO bounds the sequence's mean, not the tokens that it is the mean of."""
    policy = torch.tensor([25.0, -25.0, 0.0], dtype=torch.float64, requires_grad=True)
    zeros, ones = torch.zeros(3), torch.ones(3)
    losses = policy_losses(policy, zeros, zeros, ones, [3], LossSection(kind="gspo"))
    losses.losses_N.sum().backward()
    np.testing.assert_allclose(losses.losses_N.detach(), [-1.0, -1.0, -1.0], rtol=1e-12)
    np.testing.assert_allclose(policy.grad, [-1.0, -1.0, -1.0], rtol=1e-12)


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
        reduced(*of(part), counts, by, num_batch_tokens=NUM, num_batch_rows=4, num_batch_samples=6)
        for part, counts in ((losses[:8], COUNTS[:2]), (losses[8:], COUNTS[2:]))
    ]
    assert float(sum(shares)) == pytest.approx(expected, rel=1e-12)


def totals(tokens: list[Floats]) -> dict[str, float]:
    found = LossSums()
    for part in np.split(np.arange(NUM), [8]):
        policy, proximal, behavior, advantages = of(*(values[part] for values in tokens))
        losses = policy_losses(
            policy, proximal, behavior, advantages, [len(part)], LossSection(clip_dual=0.0)
        )
        found.add(losses, TokenScores(policy, torch.ones(len(part))), behavior)
    return found.totals().means()


def test_ratio_and_effective_sample_size() -> None:
    """The largest policy / proximal, and how many tokens the weights leave of all."""
    tokens = list(random_tokens(num=NUM))
    policy, proximal, behavior, _ = tokens
    ratio = np.exp(policy - proximal)
    applied = np.minimum(np.exp(proximal - behavior), 2.0) * ratio
    means = totals(tokens)
    assert means["ratio_max"] == pytest.approx(ratio.max(), rel=1e-12)
    assert means["ess"] == pytest.approx(applied.sum() ** 2 / (NUM * (applied**2).sum()), rel=1e-12)
    assert totals([policy] * 3 + [tokens[3]])["ess"] == 1.0
