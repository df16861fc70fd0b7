"""The optimizer that the page on losses shows as one's own: it can be used, and is Muon."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.loop.agreement import own_code
from rlstreams.workers.trainer.learn.adam import Parameter, Updated
from rlstreams.workers.trainer.learn.own import update_of
from rlstreams.workers.trainer.training.made_up import made_up
from tests.readme_blocks import blocks

PAGE = Path(__file__).parents[3] / "infra/docs/loss.md"
SHAPES = [(32, 48), (48, 32)]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The page's configuration, its code beside it."""
    saved = {block.saved_as: block.text for block in blocks(PAGE.read_text("utf-8"))}
    (tmp_path / "muon.py").write_text(saved["own/muon.py"], encoding="utf-8")
    table = tomllib.loads(saved["own/muon.toml"])["trainer"]["optimizer"]
    table["kind"] = f"{tmp_path / table['kind']}"
    run = RunConfig()
    return replace(run, trainer=replace(run.trainer, optimizer=OptimizerSection(**table)))


def updated(config: RunConfig, name: str, gradient: torch.Tensor, *, ours: bool = False) -> Updated:
    section = config.trainer.optimizer
    by = Parameter.adamw if ours else update_of(section, own_code(config))
    zeros = torch.zeros_like(gradient)
    return by(
        Parameter(name=name, values=zeros, gradient=gradient, state={}, lr=1.0, section=section)
    )


def test_it_can_be_used(config: RunConfig) -> None:
    assert len(made_up(config.trainer, 4, (), own_code(config))) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_changes_by_as_much_in_each_direction(
    config: RunConfig, shape: tuple[int, int]
) -> None:
    """Five rounds bring singular values near 1 (kellerjordan.github.io/posts/muon), and keep the
    gradient's own directions; both forms of a matrix are one."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values, state = updated(config, "layers.0.mlp.up_proj.weight", gradient)
    change = -values / (0.2 * max(shape) ** 0.5)
    u_RR, sizes_R, v_RC = torch.linalg.svd(gradient, full_matrices=False)
    here_RR = u_RR.T @ change @ v_RC.T
    assert (here_RR.diagonal() > 0.6).all()
    assert (here_RR.diagonal() < 1.3).all()
    assert (here_RR - here_RR.diagonal().diag()).abs().max() < 1e-3
    assert sizes_R.max() / sizes_R.min() > 3, "it is the optimizer that made them alike"
    assert torch.equal(state["momentum"], gradient)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_other_parameters_are_left_to_adamw(config: RunConfig, name: str) -> None:
    gradient = torch.ones(4, 4)
    assert torch.equal(
        updated(config, name, gradient)[0], updated(config, name, gradient, ours=True)[0]
    )
