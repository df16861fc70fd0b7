"""What `trainer.redo = "auto"` means."""

from __future__ import annotations

import pytest

from workers.config.trainer import TrainerSection


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
