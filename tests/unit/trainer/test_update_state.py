"""A state that an optimizer keeps: its form and place are the same after an update and a load."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.trainer.learn.adam import LOW, MOMENTS, STEP, Adam
from rlstreams.workers.trainer.learn.own import update_of

FIELD = "trainer.optimizer.kind"


def kept(returned: str) -> Tensor:
    """The state `step` after two updates by a function of one's own that returns this one."""
    text = f"import torch\ndef update(p):\n    return p.values, {{'step': {returned}}}\n"
    by = update_of(OptimizerSection(kind="mine.py:update"), {f"{FIELD}: mine.py": text})
    adam = Adam({"p": nn.Parameter(torch.ones(3))})
    for _ in range(2):
        adam.take("p", torch.ones(3))
        adam.update(1.0, by=by)
    return adam.tensors()[f"p:{STEP}"]


@pytest.mark.parametrize(
    "returned",
    [
        "p.state.get('step', 0) + 1",
        "p.state.get('step', 0.0) + 1.0",
        "p.state.get('step', torch.tensor(0)) + torch.tensor(1)",
        "p.state.get('step', torch.tensor(0.0).double()) + torch.tensor(1.0).double()",
    ],
)
def test_a_count_of_ones_own_may_be_called_step(returned: str) -> None:
    """It is what a checkpoint gives back, a float32 tensor, whatever number was returned."""
    found = kept(returned)
    assert (found.dtype, found.shape, found.item()) == (torch.float32, (), 2.0)


@pytest.mark.parametrize("key", [*MOMENTS, LOW])
def test_a_parameter_of_one_number_has_its_state_beside_it(key: str) -> None:
    """A number of the state lies on the host; a moment of no axis is no such number."""
    adam = Adam({"p": nn.Parameter(torch.zeros((), device="meta"))})
    adam.load({"p": {key: torch.zeros((), device="meta"), "count": torch.zeros(())}})
    assert adam.tensors()[f"p:{key}"].device.type == "meta"
    assert adam.tensors()["p:count"].device.type == "cpu"
