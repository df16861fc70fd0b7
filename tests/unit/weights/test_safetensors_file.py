"""A file is read whole and checked, or refused: nothing of a damaged one becomes a weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlstreams.workers.weights.layout import weight_hash
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.safetensors_file import read

WEIGHTS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.zeros(0, 4),
    "d": torch.tensor(7, dtype=torch.int64),
}
HASH = weight_hash(WEIGHTS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "v.safetensors"
    save_file(WEIGHTS, path, {"policy_version": "7"})
    return path


def test_it_reads_what_the_library_wrote(file: Path) -> None:
    """Bits, dtypes and shapes, an empty and a scalar tensor too, in name order."""
    tensors = read(file, HASH)
    assert sorted(WEIGHTS) == list(tensors)
    assert all(torch.equal(WEIGHTS[name], tensors[name]) for name in WEIGHTS)
    assert HASH == weight_hash(tensors)


def test_what_is_written_to_a_tensor_stays_out_of_the_file(file: Path) -> None:
    """It is mapped, and private."""
    read(file, HASH)["a"].add_(1)
    assert torch.equal(WEIGHTS["a"], read(file, HASH)["a"])


def test_other_content_is_named_with_both_hashes(file: Path) -> None:
    """A whole file, but not the version that was published."""
    with pytest.raises(PullError, match=f"has content {HASH}, {'0' * 64} was published") as caught:
        read(file, "0" * 64)
    assert "checksum" == caught.value.kind


def test_a_file_cut_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for size in (0, 4, 8, 9, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(PullError) as caught:
            read(file, HASH)
        assert "checksum" == caught.value.kind
