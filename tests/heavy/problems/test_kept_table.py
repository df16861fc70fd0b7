"""The table of a file that is too large to read at every start."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rlstreams.workers.dataset.files import REMEMBERED_BYTES
from tests.unit.problems.rows import dataset, everything, problems

PAD = "x" * (REMEMBERED_BYTES // 9)
NAMES = list("abcdefghij")


def test_table_and_hash_of_a_large_file_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hash that a power cut emptied is computed anew, and the table has its name still."""
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": name, "pad": PAD} for name in NAMES]
    assert NAMES == everything(dataset(tmp_path, *rows))
    (table,) = (tmp_path / "cache" / "tables").iterdir()
    (hashed,) = (tmp_path / "cache" / "hashes").iterdir()
    made = table.stat()
    hashed.write_bytes(b"")
    assert NAMES == everything(problems(train=str(tmp_path / "rows.jsonl")).train)
    assert made == table.stat()
    assert hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest() == hashed.read_text()
