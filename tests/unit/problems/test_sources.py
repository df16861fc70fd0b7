"""Rows from Parquet, what needs a package that is missing, and the hash of a data set."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.json
import pyarrow.parquet
import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import ColumnsSection, DataSection
from rlstreams.workers.dataset.identity import data_hashes
from rlstreams.workers.dataset.open import open_problems
from rlstreams.workers.dataset.row import PromptText
from tests.unit.problems.rows import Characters, everything, problems, write

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n % 3} for n in range(20)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path / "cache"))


def parquet(path: Path, rows: list[dict[str, Any]], **types: pyarrow.DataType) -> str:
    """A file of rows; `types`: of the columns that JSON has no type for."""
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    table = pyarrow.json.read_json(
        pyarrow.BufferReader(lines.encode())
    )  # `from_pylist` reads pandas
    schema = pyarrow.schema(
        [field.with_type(types.get(field.name, field.type)) for field in table.schema]
    )
    pyarrow.parquet.write_table(table.cast(schema), path, row_group_size=7)
    return str(path)


def test_parquet_has_the_rows_of_json_lines(tmp_path: Path) -> None:
    """A file, and a folder of files in the order of their names."""
    file = parquet(tmp_path / "rows.parquet", ROWS)
    (tmp_path / "parts").mkdir()
    for number in range(2):
        parquet(tmp_path / "parts" / f"{number}.parquet", ROWS[10 * number : 10 * number + 10])
    wanted = problems(train=write(tmp_path, *ROWS)).train
    for name in (file, str(tmp_path / "parts")):
        found = problems(train=name).train
        assert len(found) == len(ROWS)
        for number in range(len(ROWS)):
            one, other = wanted.row(number), found.row(number)
            assert (one.prompt, one.answer, one.metadata) == (
                other.prompt,
                other.answer,
                other.metadata,
            )
    assert f"{file}: row 3" == problems(train=file).train.place(2)


@pytest.mark.parametrize(("suffix", "dialect"), [("csv", "excel"), ("tsv", "excel-tab")])
def test_tables_have_the_rows_of_json_lines(tmp_path: Path, suffix: str, dialect: str) -> None:
    """Whatever a cell has in it; a long one is as long as a line may be."""
    rows = [
        {"prompt": prompt, "answer": str(n)}
        for n, prompt in enumerate(('a, "b"', "one\ntwo\tthree", "é", "long " * 40_000))
    ]
    path = tmp_path / f"rows.{suffix}"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["answer", "prompt"], dialect=dialect)
        writer.writeheader()
        writer.writerows(rows)
    found = problems(train=str(path)).train
    got = [found.row(number) for number in range(len(found))]
    assert [{"prompt": row.prompt, "answer": row.answer} for row in got] == rows


def test_verl_files_are_read_as_they_are(tmp_path: Path) -> None:
    """Messages, and an answer inside another column."""
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
    }
    found = problems(train=parquet(tmp_path / "verl.parquet", [row]), preset="verl").train.row(0)
    assert ([{"content": "1+1?", "role": "user"}], "2") == (found.prompt, found.answer)
    assert 7 == json.loads(found.metadata)["extra_info"]["index"]


def test_a_column_that_no_parquet_file_has(tmp_path: Path) -> None:
    file = parquet(tmp_path / "rows.parquet", ROWS)
    with pytest.raises(ConfigError, match=r"no column 'source' \(columns: prompt, answer, level\)"):
        problems(train=file, columns=ColumnsSection(metadata=("source",)))
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"bad\.parquet: no readable Parquet"):
        problems(train=str(tmp_path / "bad.parquet"))


def test_bytes_are_refused_with_a_way_out(tmp_path: Path) -> None:
    """An image column stands in the way until the others are named."""
    file = parquet(
        tmp_path / "rows.parquet", [{**row, "image": "x"} for row in ROWS], image=pyarrow.binary()
    )
    with pytest.raises(
        ConfigError, match=r"row 1: a column holds bytes; .*data\.columns\.metadata"
    ):
        problems(train=file)
    found = problems(train=file, columns=ColumnsSection(metadata=("level",)))
    assert '{"level": 0}' == found.train.row(0).metadata


def test_an_empty_folder_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has neither Parquet files nor"):
        problems(train=str(tmp_path))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reasoning_gym", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # what an import of it then fails on
    with pytest.raises(ConfigError, match=r"needs a package .* pip install 'rlstreams\[gym\]'"):
        problems(train="gym:chain_sum")
    with pytest.raises(ConfigError, match=r"needs a package .* pip install 'rlstreams\[hub\]'"):
        problems(train="hf:openai/gsm8k")


def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client, which a first failure has closed, raises what no library documents."""

    def load_dataset(*_: object, **__: object) -> object:
        raise RuntimeError("Cannot send a request, as the client has been closed.")

    library = ModuleType("datasets")
    library.__spec__ = ModuleSpec("datasets", None)
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    library.exceptions = SimpleNamespace(DatasetsError=KeyError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(ConfigError, match="hf:openai/gsm8k cannot be loaded: Cannot"):
        problems(train="hf:openai/gsm8k", held_out_rows=8)


def test_the_hash_of_a_data_set(tmp_path: Path) -> None:
    """A plain file has its own; which rows it gives changes it, where it lies does not."""
    file, copy = write(tmp_path, *ROWS), write(tmp_path, *ROWS, name="copy.jsonl")
    plain = data_hashes(DataSection(train=file))
    assert {"train": hashlib.sha256(Path(file).read_bytes()).hexdigest()} == plain
    assert plain == data_hashes(DataSection(train=copy))
    shaped = data_hashes(DataSection(train=file, held_out_rows=3))
    others = [data_hashes(DataSection(train=file, held_out_rows=n)) for n in (1, 2)]
    template = tmp_path / "template.txt"
    for text in ("{prompt}", "{prompt}?"):
        template.write_text(text)
        others.append(data_hashes(DataSection(train=file, template=str(template))))
    different = {found["train"] for found in (plain, shaped, *others)}
    assert len(different) == 2 + len(others)
    assert shaped == data_hashes(DataSection(train=copy, held_out_rows=3))
    assert {} == data_hashes(DataSection(train=str(tmp_path / "gone.jsonl")))


class Doubled(Characters):
    """Another tokenizer: two tokens per character."""

    hash = "doubled"

    def encode_prompt(self, prompt: PromptText) -> list[int]:
        return 2 * super().encode_prompt(prompt)


@pytest.mark.parametrize(
    ("fields", "longest", "encoder", "kept"),
    [
        ({"max_prompt_tokens": 8}, None, Characters(), (2, 5)),
        ({"max_prompt_tokens": 8}, 5, Characters(), (2,)),
        ({"max_prompt_tokens": 8}, None, Doubled(), (2,)),
        ({"min_prompt_tokens": 3}, None, Characters(), (5, 9)),
    ],
)
def test_a_table_is_kept_for_its_limits(
    tmp_path: Path, fields: dict[str, int], longest: int | None, encoder: Characters, kept: Any
) -> None:
    """A start with others, or with another model, has other rows of the same file."""
    file = parquet(
        tmp_path / "rows.parquet", [{"prompt": "x" * n, "answer": ""} for n in (2, 5, 9)]
    )
    first = {"max_prompt_tokens": 8} if "max_prompt_tokens" in fields else {}
    problems(train=file, **first)
    found = open_problems(DataSection(train=file, **fields), encoder, longest).train
    assert ["x" * n for n in kept] == everything(found)


@pytest.mark.parametrize("damage", [b"", b"ARROW1"])
def test_a_table_that_a_power_cut_left_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    """A start takes the table that is kept; one that is not whole costs one more pass."""
    file = parquet(tmp_path / "rows.parquet", ROWS)
    wanted = everything(problems(train=file).train)
    (kept,) = (tmp_path / "cache" / "tables").iterdir()
    before = kept.stat()
    assert wanted == everything(problems(train=file).train)
    assert before == kept.stat()
    kept.write_bytes(damage)
    assert wanted == everything(problems(train=file).train)
    assert before.st_size == kept.stat().st_size


def test_a_cache_that_cannot_be_written_is_not_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """The rows of a Parquet file are kept in the cache folder, which may be another disk's."""
    (tmp_path / "cache").write_text("in the place of a folder")
    told = r"data\.train: the table of its rows cannot be kept in .*tables \(.*RLSTREAMS_CACHE"
    with pytest.raises(ConfigError, match=told):
        problems(train=parquet(tmp_path / "rows.parquet", ROWS))
