"""What `trainer.redo = "auto"` means, what a claim says of numerics, and what counts as equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.model.model import Numerics
from rlstreams.workers.trainer.facts import versions
from rlstreams.workers.trainer.redo.redo import Redone, RedoneStep, differences


@pytest.mark.parametrize(
    ("device", "redo", "expected"),
    [
        ("cpu", "auto", True),
        ("cuda:1", "auto", False),
        ("cuda", "exact", True),
        ("cpu", "tolerate", False),
    ],
)
def test_a_redo_is_exact_where_kernels_are(device: str, redo: str, expected: bool) -> None:
    """On the CPU unless told otherwise; on a GPU only if asked for."""
    assert TrainerSection(device=device, redo=redo).is_redo_exact is expected  # type: ignore[arg-type]


def test_a_gpu_whose_gradients_had_no_one_order_is_told_of() -> None:
    """A redo that is asked to be exact names what it cannot repeat."""
    before, now = (
        versions(Numerics(threads=1, cpu_capability="", device="H", in_one_order=ordered))
        for ordered in (False, True)
    )
    assert "gradients was in any order and is in one order" == differences(before, now)
    plain = versions(Numerics(threads=1, cpu_capability=""))
    assert "gradients" not in plain


def test_a_claim_says_whether_layers_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, and by which compiler; compiled layers round otherwise."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name}-9")
    before, now = (
        versions(Numerics(threads=1, cpu_capability="", device="H", compiled=compiled))
        for compiled in (False, True)
    )
    assert "layers was as they are and is compiled by triton triton-9" == differences(before, now)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_redo_of_no_step_is_none(num_steps: int) -> None:
    """A start that lacks none tells of none."""
    redone = Redone(
        first_step=4, last_step=3 + num_steps, num_equal=0, first_unequal=None, last_unequal=None,
        seconds=0.0,
    )  # fmt: skip
    assert num_steps == redone.num_steps


@pytest.mark.parametrize(
    ("weights", "recorded", "heads", "expected"),
    [
        ("w", "w", ("h", "h"), True),
        ("w", "w", ("", ""), True),
        ("w", "w", ("h", "i"), False),
        ("v", "w", ("h", "h"), False),
        ("w", "x", ("h", "i"), True),  # behind a drift, whose value head is not in the log
    ],
)
def test_a_step_is_equal_with_its_value_head(
    weights: str, recorded: str, heads: tuple[str, str], expected: bool
) -> None:
    """Weights alone would be equal once more before the critic's error is in them."""
    step = RedoneStep(
        fact=cast(Any, SimpleNamespace(weight_hash="w")),
        recorded=cast(Any, SimpleNamespace(weight_hash=recorded, value_head_hash=heads[0])),
        payloads=[],
        again=cast(Any, SimpleNamespace(weight_hash=weights, value_head_hash=heads[1])),
    )
    assert step.is_equal is expected
