"""The index of a file that is too large to read at every start."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from rlstreams.workers.dataset.files import REMEMBERED_BYTES
from tests.unit.problems.rows import dataset, everything, problems

PAD = "x" * (REMEMBERED_BYTES // 9)
NAMES = list("abcdefghij")


@pytest.mark.parametrize("left", ["nothing", "of a process killed", "empty", "cut"])
def test_an_index_is_kept_whatever_an_earlier_start_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """A start that was killed, or a power cut, costs one more pass and no more."""
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": name, "pad": PAD} for name in NAMES]
    assert NAMES == everything(dataset(tmp_path, *rows))
    (index,) = (tmp_path / "cache" / "indexes").iterdir()
    (hashed,) = (tmp_path / "cache" / "hashes").iterdir()
    if left == "of a process killed":
        index.rename(index.with_name(f"{index.name}.{os.getpid()}"))
    elif left == "empty":
        (index / "facts.json").write_bytes(b"")
        hashed.write_bytes(b"")
    elif left == "cut":
        (index / "facts.json").unlink()
    again = problems(train=str(tmp_path / "rows.jsonl"))
    assert NAMES == everything(again.train)
    assert hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest() == hashed.read_text()
