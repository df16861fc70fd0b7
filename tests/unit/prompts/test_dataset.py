"""Rows of a data set: what is refused and how it is named, and in which order rows come."""

from __future__ import annotations

from pathlib import Path

import pytest

from streams.errors import ConfigError
from workers.prompts.dataset import Dataset, Order


def dataset(folder: Path, *lines: str) -> Dataset:
    file = folder / "rows.jsonl"
    file.write_bytes("\n".join(lines).encode())
    return Dataset("data.train", str(file))


def test_rows_are_read_by_number(tmp_path: Path) -> None:
    """Blank lines have no number, free fields are metadata, other answers become JSON text."""
    rows = dataset(
        tmp_path,
        '{"prompt": "1+1=", "answer": "2", "x": 3}',
        "",
        '{"prompt": "é", "answer": 4}',
    )
    assert len(rows) == 2
    second, first = rows.row(1), rows.row(0)
    assert (first.prompt, first.answer, first.metadata) == ("1+1=", "2", '{"x": 3}')
    assert (second.prompt, second.answer, second.metadata) == ("é", "4", "{}")
    assert second.place.endswith("rows.jsonl:3")


def test_a_chat_is_a_prompt(tmp_path: Path) -> None:
    """A list of messages is kept as it is."""
    rows = dataset(tmp_path, '{"prompt": [{"role": "user", "content": "hi"}]}')
    assert rows.row(0).prompt == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"answer": "2"}', r"rows\.jsonl:2: no `prompt` \(fields: answer\)"),
        ("{", r"rows\.jsonl:2: not a line of JSON"),
        ("[1]", r"rows\.jsonl:2: not a JSON object: \[1\]"),
        ('{"prompt": ""}', r"rows\.jsonl:2: `prompt` must be text .* got \"\""),
        ('{"prompt": 3}', r"rows\.jsonl:2: `prompt` must be text .* got 3"),
        ('{"prompt": [{"role": "user"}]}', r"rows\.jsonl:2: `prompt` must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    """Field of the configuration, file, line and what is there are in the message."""
    with pytest.raises(ConfigError, match="data.train: .*" + told):
        dataset(tmp_path, '{"prompt": "fine"}', line)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    """Empty, missing and unnamed files are told apart."""
    with pytest.raises(ConfigError, match="has no rows"):
        dataset(tmp_path, "", "")
    with pytest.raises(ConfigError, match="cannot read 'nowhere': No such file"):
        Dataset("data.train", "nowhere")
    with pytest.raises(ConfigError, match=r"data\.train is empty"):
        Dataset("data.train", "")


def test_every_epoch_has_every_row_once_in_its_own_order() -> None:
    """Two epochs are two permutations."""
    order = Order(seed=3, num_rows=50)
    places = [order.at(position) for position in range(100)]
    epochs = [[row for epoch, row in places if epoch == number] for number in (0, 1)]
    assert [list(range(50))] * 2 == [sorted(rows) for rows in epochs]
    assert epochs[0] != epochs[1]
    assert epochs[0] != [row for _, row in map(Order(4, 50).at, range(50))]


def test_the_order_is_the_same_on_every_machine() -> None:
    """A run that is resumed elsewhere goes on where it was."""
    order = Order(seed=7, num_rows=6)
    assert [order.at(position) for position in range(3)] == [(0, 4), (0, 1), (0, 3)]


def test_the_order_goes_on_behind_what_was_issued() -> None:
    """The position after rows of an epoch is behind the last of them, wherever that is."""
    order = Order(seed=3, num_rows=5)
    rows = [row for _, row in map(order.at, range(5))]
    assert order.after(0, []) == 0
    assert order.after(0, {rows[0], rows[2]}) == 3
    assert order.after(2, set(rows)) == 15
