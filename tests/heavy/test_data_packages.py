"""Rows from what `datasets` saved or knows by name, and from a gym's task: the real packages."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import GymSection
from tests.unit.problems.rows import everything, problems, write

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n % 3} for n in range(20)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.skipif(find_spec("datasets") is None, reason="needs rlstreams[hub]")
def test_what_datasets_saved_is_read(tmp_path: Path) -> None:
    """A folder of `save_to_disk`; one of several splits lists them."""
    import datasets

    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(str(tmp_path / "two"))
    assert [row["prompt"] for row in ROWS] == everything(
        problems(train=str(tmp_path / "one")).train
    )
    with pytest.raises(
        ConfigError, match=r"holds several splits; name one: .*two/train, .*two/test"
    ):
        problems(train=str(tmp_path / "two"))


@pytest.mark.skipif(find_spec("datasets") is None, reason="needs rlstreams[hub]")
def test_a_data_set_by_name(tmp_path: Path) -> None:
    """`hf:` hands name, split and revision to `datasets`; here the name is a folder's."""
    write(tmp_path, *ROWS, name="train.jsonl")
    write(tmp_path, {"prompt": "held", "answer": "out"}, name="test.jsonl")
    name = f"hf:{tmp_path}"
    found = problems(train=f"{name}@train[:5]", held_out=name)
    assert [row["prompt"] for row in ROWS[:5]] == everything(found.train)
    assert found.held_out is not None
    assert ["held"] == everything(found.held_out)
    with pytest.raises(ConfigError, match=r"data\.train: hf:.*nosuch"):
        problems(train=f"{name}@nosuch")


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs rlstreams[gym]")
def test_a_gym_makes_problems() -> None:
    """As many as asked, with the task's own options; its name may be mistyped."""
    gym = GymSection(rows=12, seed=3, options={"max_terms": 3})
    found = problems(train="gym:chain_sum", gym=gym, held_out_rows=2)
    assert found.held_out is not None
    assert (10, 2) == (len(found.train), len(found.held_out))
    row = found.train.row(0)
    assert "chain_sum" == json.loads(row.metadata)["gym"]["source_dataset"]
    assert str(eval(json.loads(row.metadata)["gym"]["expression"])) == row.answer
    with pytest.raises(ConfigError, match=r"no task 'chain_sums'; did you mean chain_sum"):
        problems(train="gym:chain_sums")
    with pytest.raises(ConfigError, match=r"data\.gym\.options: task chain_sum: .*max_tern"):
        problems(train="gym:chain_sum", gym=GymSection(options={"max_terns": 3}))
