"""The loss that the page on losses shows as one's own: it can be used, and is the paper's."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.agreement import own_code
from rlstreams.workers.trainer.learn.loss import policy_losses
from rlstreams.workers.trainer.learn.own import loss_of
from rlstreams.workers.trainer.learn.rewarded import RewardedSample, advantages_of
from rlstreams.workers.trainer.training.made_up import made_up
from tests.readme_blocks import blocks

PAGE = Path(__file__).parents[3] / "infra/docs/loss.md"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The page's configuration, its code beside it."""
    saved = {block.saved_as: block.text for block in blocks(PAGE.read_text("utf-8"))}
    (tmp_path / "topr.py").write_text(saved["own/topr.py"], encoding="utf-8")
    table = tomllib.loads(saved["own/topr.toml"])["trainer"]["loss"]
    for field in ("kind", "advantage"):
        table[field] = f"{tmp_path / table[field]}"
    run = RunConfig()
    return replace(run, trainer=replace(run.trainer, loss=LossSection(**table)))


def test_it_can_be_used(config: RunConfig) -> None:
    lines = made_up(config.trainer, 4, (), own_code(config))
    assert len(lines) == 2


def test_it_is_topr(config: RunConfig) -> None:
    """Good answers without their ratio, bad ones with it, at most 1 (arXiv 2503.14286)."""
    by, code = config.trainer.loss, own_code(config)
    pi = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([-2.0, -1.0, -2.0, -1.0], dtype=torch.float64)
    gains = [1.0, 1.0, -1.0, -1.0]
    advantages = torch.tensor(gains, dtype=torch.float64)
    found = policy_losses(pi, mu, mu, advantages, [2, 2], by, call=loss_of(by, code))
    found.losses_N.sum().backward()  # type: ignore[no-untyped-call]
    assert pi.grad is not None
    assert pi.grad.tolist() == pytest.approx([-1.0, -1.0, 1.0, math.exp(-2.0)])
    assert found.is_clipped_N.tolist() == [False, False, True, False]
    made = [
        RewardedSample(
            group="7", number=n, reward=r, parts={}, turn_tokens=(2,), is_truncated=False
        )
        for n, r in enumerate([1.0, 0.0, 0.0])
    ]
    assert advantages_of(made, by, code).of_samples.tolist() == pytest.approx(
        [2 / 3, -1 / 3, -1 / 3]
    )
