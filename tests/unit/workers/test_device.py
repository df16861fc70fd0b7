"""Which GPU a role sees."""

from __future__ import annotations

import os

import pytest
import torch

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.load import load
from rlstreams.workers.model.base import VISIBLE
from rlstreams.workers.model.device import claim_device, nearest_devices


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As on a machine that has some."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(VISIBLE, raising=False)
    return monkeypatch


def test_a_cpu_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout worker on the CPU starts a server that needs its GPU."""
    monkeypatch.setenv(VISIBLE, "1")
    assert ("cpu", "1") == (claim_device("trainer.device", "cpu"), os.environ[VISIBLE])


@pytest.mark.parametrize(
    ("named", "wanted", "left"),
    [(None, "cuda:1", "1"), ("4,6", "cuda:1", "6"), ("GPU-a,GPU-b", "cuda:0", "GPU-a")],
)
def test_a_role_sees_its_gpu_only(
    gpus: pytest.MonkeyPatch, named: str | None, wanted: str, left: str
) -> None:
    """Counted among those that it was given."""
    if named is not None:
        gpus.setenv(VISIBLE, named)
    assert ("cuda", left) == (claim_device("trainer.device", wanted), os.environ[VISIBLE])


def test_a_gpu_that_was_not_given_is_refused(gpus: pytest.MonkeyPatch) -> None:
    gpus.setenv(VISIBLE, "4,6")
    with pytest.raises(ConfigError, match=r"logprob\.device is 'cuda:2', but .* leaves 2 GPUs"):
        claim_device("logprob.device", "cuda:2")


def test_a_machine_without_a_gpu_says_so(gpus: pytest.MonkeyPatch) -> None:
    """To run there is refused; to look at a run of a GPU is not."""
    gpus.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"trainer\.device is 'cuda', but torch .* no GPU"):
        claim_device("trainer.device", "cuda")
    assert nearest_devices("trainer.device", "cuda:1", 2) == ("cpu", ("",))


@pytest.mark.parametrize("field", ["rollout", "logprob", "trainer"])
def test_a_device_that_is_none_is_refused_with_its_name(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field}\.device must be .*, got 'gpu'"):
        load([], [f"{field}.device=gpu"])
