"""A model whose gradients have no one order ends the run with the field that cures it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.model import one_order
from rlstreams.workers.trainer.training.training import Training
from tests.heavy.trainer.trainer_stand import (
    make_config,
    make_log,
    make_trainer,
    scored,
    send,
    tick_until,
)


class Unordered(Training):
    """As on a GPU that lacks a kernel which the backward needs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        one_order.ask(True)
        model: Any = self.learner._shards.model
        model.get_input_embeddings().register_forward_hook(_refuse_backward)


def _refuse_backward(_module: object, _args: object, output: torch.Tensor) -> None:
    def refuse(_gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("roll_cuda does not have a deterministic implementation")

    if output.requires_grad:
        output.register_hook(refuse)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    one_order.ask(False)


def test_the_field_that_cures_it_is_named(tmp_path: Path) -> None:
    """A refusal of the configuration: nobody starts it again, nothing is dead-lettered."""
    log, config = make_log(), make_config(tmp_path)
    trainer = make_trainer(log, config, hardware=Unordered)
    send(log, *(scored(0, sample, 0) for sample in range(2)))
    told = r"trainer\.redo is 'auto', but roll_cuda .* set it to \"tolerate\""
    with pytest.raises(ConfigError, match=told):
        tick_until(trainer, lambda: False)
    trainer.close()
