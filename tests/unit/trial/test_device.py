"""Where `try` samples: where the run would, as far as this host can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlstreams.check.trial.sample import device_of
from rlstreams.workers.config.load import load

DEMO = Path(__file__).parents[3] / "infra/examples/demo.toml"
SERVED = ("rollout.engine=vllm", "trainer.device=cuda:1", "weights.channel=nccl")


@pytest.mark.parametrize(
    ("words", "expected"),
    [((), "cpu"), (("rollout.device=cuda:2",), "cuda:2"), (SERVED, "cuda:1")],
)
def test_it_is_the_samplers_device_or_in_a_servers_place_the_trainers(
    words: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of half a billion weights takes minutes a row on a CPU."""
    config = load([DEMO], list(words))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert expected == device_of(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cpu" == device_of(config)
