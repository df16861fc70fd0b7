"""The table of a file that is too large to read at every start."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.workers.dataset.table import KEPT_FROM_BYTES
from tests.unit.problems.rows import dataset, everything, problems

PAD = "x" * (KEPT_FROM_BYTES // 9)
NAMES = list("abcdefghij")


def test_the_table_of_a_large_file_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its content: another start maps what is there."""
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": name, "pad": PAD} for name in NAMES]
    assert NAMES == everything(dataset(tmp_path, *rows))
    (table,) = (tmp_path / "cache" / "tables").iterdir()
    made = table.stat()
    assert NAMES == everything(problems(train=str(tmp_path / "rows.jsonl")).train)
    assert made == table.stat()
