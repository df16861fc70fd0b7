"""What is exported is read by polars and by Hugging Face datasets, which take seconds to import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlstreams.show.export.sample_table import SCHEMA, sample_rows, write
from tests.heavy.test_export import FATES, SPELLING
from tests.late import Late
from tests.unit.inspect import told_run

pl = Late("polars")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The told run's samples in both formats."""
    folder = tmp_path_factory.mktemp("samples")
    for suffix in ("parquet", "jsonl"):
        write(sample_rows(told_run.bus_log(), SPELLING), SCHEMA, str(folder / f"s.{suffix}"))
    return folder


def test_polars_reads_samples(samples: Path) -> None:
    """Both formats, to the same numbers."""
    parquet = pl.read_parquet(samples / "s.parquet")
    lines = pl.read_ndjson(samples / "s.jsonl", infer_schema_length=None)
    assert list(FATES) == sorted(parquet["id"])
    assert parquet["behavior_logprobs"].to_list() == lines["behavior_logprobs"].to_list()
    assert {"trained": 3} == dict(
        parquet.filter(pl.col("step") > 0).group_by("outcome").len().iter_rows()
    )


def test_datasets_reads_samples(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every table's types are known to it; nothing is asked of a network."""
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(os.environ, "HF_HOME", str(tmp_path / "home"))
    import datasets

    datasets.disable_progress_bars()
    cache = str(tmp_path / "cache")
    for suffix, load in (
        ("parquet", datasets.Dataset.from_parquet),
        ("jsonl", datasets.Dataset.from_json),
    ):
        found = load(str(samples / f"s.{suffix}"), cache_dir=cache)
        assert list(FATES) == sorted(found["id"])
        assert found[0]["prompt"] == "2 + 3 ="
