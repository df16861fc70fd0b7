"""A backward is strict where gradients are to add up in one order, and only the backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlstreams.workers.model import one_order


class Noted(torch.autograd.Function):
    """The identity; notes whether an operation without one order would be refused by then."""

    seen: list[tuple[str, bool]]
    refusal = ""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Noted.seen.append(("forward", _is_strict()))
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Noted.seen.append(("backward", _is_strict()))
        if Noted.refusal:
            raise RuntimeError(Noted.refusal)
        return gradient


def _is_strict() -> bool:
    return not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """Torch's switches as `configure_torch` sets them there; put back in the end."""
    before = torch.are_deterministic_algorithms_enabled(), not _is_strict()
    torch.use_deterministic_algorithms(True, warn_only=True)
    Noted.seen, Noted.refusal = [], ""
    yield
    one_order.ask(False)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _loss() -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    noted: torch.Tensor = checkpoint(
        lambda x: Noted.apply(x).exp(),
        x,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=one_order.computed_again,
    )
    return noted.sum()


@pytest.mark.parametrize("asked", [True, False])
def test_only_the_backward_is_strict(asked: bool) -> None:
    """What it computes forward again is told of at most, as a forward is; the switch comes back."""
    one_order.ask(asked)
    one_order.backward(_loss())
    assert Noted.seen == [("forward", False), ("forward", False), ("backward", asked)]
    assert not _is_strict()


def test_any_other_failure_stays_what_it_is() -> None:
    """Memory that ran out is for the trainer to handle."""
    one_order.ask(True)
    Noted.refusal = "out of memory"
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        one_order.backward(_loss())
    assert caught.type is RuntimeError
