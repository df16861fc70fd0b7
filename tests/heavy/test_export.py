"""Exported tables: one schema for both formats, one row per sample. pyarrow imports pandas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlstreams.__main__ import main
from rlstreams.show.export.sample_table import SCHEMA, batches, sample_rows, write
from rlstreams.words.spelling import Spelling
from tests import factories as f
from tests.unit.inspect import told_run

SPELLING = Spelling(decode=told_run.decode, plain=told_run.decode, hash=f.HASH)
FATES = {
    "0/0": ("trained", None, 1),
    "0/1": ("trained", None, 1),
    "1/0": ("trained", None, 2),
    "1/1": ("left out", "reward", None),
    "2/0": ("dropped", "stale", None),
    "4/1": ("in flight", None, None),
    "e1-7/0": ("evaluated", None, None),
}


def rows() -> dict[str, dict[str, Any]]:
    """The table `samples` of the told run, by id, as a reader gets it."""
    found = batches(sample_rows(told_run.bus_log(), SPELLING), SCHEMA)
    return {row["id"]: row for batch in found for row in batch.to_pylist()}


def test_every_rollout_has_one_row() -> None:
    """With what became of it; a copy has none."""
    found = rows()
    assert FATES == {name: (r["outcome"], r["reason"], r["step"]) for name, r in found.items()}


def test_a_row_has_prompt_completion_and_tokens() -> None:
    """Aligned with `token_ids`; null where no policy sampled or nobody rescored."""
    row = rows()["1/0"]
    assert ("2 + 3 =", "56<eos>56<eos>", "5") == (row["prompt"], row["completion"], row["expected"])
    assert [0] * 5 + [1] * 6 == row["completion_mask"]
    assert [None] * 5 + [0] * 3 + [1] * 3 == row["policy_versions"]
    assert [None, -0.5, -0.375] == row["proximal_logprobs"][4:7]
    assert row["reference_logprobs"] is None
    assert (1, 2, 0.5, "stop", 6) == (
        row["staleness"],
        row["made_version"],
        row["mismatch"],
        row["finish_reason"],
        row["num_sampled"],
    )
    assert [{"name": "exact", "value": 1.0}] == row["reward_parts"]
    assert f.NOW_MS == row["issued_at"].timestamp() * 1000


def test_an_evaluation_has_no_scores() -> None:
    """And is there all the same."""
    row = rows()["e1-7/0"]
    assert ("evaluate", None, None) == (row["purpose"], row["mismatch"], row["scored_at"])
    assert row["proximal_logprobs"] is None
    assert [None] * 5 == row["behavior_logprobs"][:5]


def test_every_column_is_described() -> None:
    """A sentence in the file's metadata, in the order that `--schema` prints."""
    assert all(field.metadata[b"doc"] for field in SCHEMA)


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    """An error leaves nothing behind, and what was there before."""
    out = tmp_path / "new" / "t.parquet"

    def broken() -> Iterator[dict[str, Any]]:
        yield {"id": "1/0"}
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write(broken(), SCHEMA, str(out))
    assert [] == list(out.parent.iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(told_run.recorded(tmp_path_factory.mktemp("told") / "told", told_run.memory_bus()))


def test_the_command_writes_what_was_asked_for(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Filtered, and it says how many rows there are."""
    out = tmp_path / "right.parquet"
    words = ["export", "samples", folder, "--out", str(out), "--min-reward", "1"]
    assert 0 == main(words)
    assert "5 rows in " in capsys.readouterr().err
    assert {1.0} == set(pq.read_table(out)["reward"].to_pylist())


def test_lines_go_to_standard_output(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["export", "samples", folder, "--out", "-", "--step", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert ["0/0", "0/1"] == [json.loads(line)["id"] for line in lines]


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["export", "samples", "--schema"])
    assert "under the policy that sampled, nats" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["export", "samples", "FOLDER"], "export samples needs --out"),
        (["export", "samples", "FOLDER", "--out", "x.csv"], "must end in .parquet or .jsonl"),
        (["export", "samples", "--out", "-"], "no CONFIG is named and there is no run.toml"),
    ],
)
def test_refusals(
    folder: str, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit 78."""
    assert 78 == main([folder if word == "FOLDER" else word for word in words])
    assert expected in capsys.readouterr().err
