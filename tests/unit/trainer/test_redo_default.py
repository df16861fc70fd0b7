"""What `trainer.redo = "auto"` means."""

from __future__ import annotations

import pytest

from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.model.model import Numerics
from rlstreams.workers.trainer.facts import versions
from rlstreams.workers.trainer.redo.redo import differences


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
