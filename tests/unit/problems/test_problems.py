"""Rows of a data set: how they are read, what is refused and how it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import ColumnsSection, DataSection, Example
from rlstreams.workers.dataset.identity import data_hashes
from rlstreams.workers.dataset.limits import SPARE_TOKENS
from rlstreams.workers.dataset.open import first_rows, open_problems
from rlstreams.workers.dataset.row import PromptText
from tests.unit.problems.rows import Characters, dataset, everything, problems, write

CHAT = [{"role": "user", "content": "?"}]


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


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"answer": "2"}', r"rows\.jsonl:2: no `prompt` \(fields: answer\)"),
        ('{"prompt": "a", "answer": ', r"rows\.jsonl:2:26: not a line of JSON"),
        ("{", r"rows\.jsonl:2:2: not a line of JSON"),
        ("[1]", r"rows\.jsonl:2: not a JSON object: \[1\]; .* `jq -c '\.\[\]' FILE`"),
        ("[", r"rows\.jsonl:2:2: not a line of JSON: Expecting value; .* `jq -c '\.\[\]' FILE`"),
        ('"text"', r"rows\.jsonl:2: not a JSON object: \"text\"$"),
        ('{"prompt": ""}', r"rows\.jsonl:2: `prompt` must be text .* got \"\""),
        ('{"prompt": 3}', r"rows\.jsonl:2: `prompt` must be text .* got 3"),
        ('{"prompt": [{"role": "user"}]}', r"rows\.jsonl:2: `prompt` must be"),
        (r'{"prompt": "\ud83d"}', r"rows\.jsonl:2: `prompt` has '.ud83d', half of a character"),
        (r'{"prompt": "a", "\udc00": 1}', r"rows\.jsonl:2: `.udc00` has '.udc00', half of"),
        (r'{"prompt": "a", "x": [{"y": "\ud83d"}]}', r"rows\.jsonl:2: `x` has '.ud83d'"),
        ("[" * 100_000, r"rows\.jsonl:2: nested too deeply"),
        pytest.param("x" * (5 << 20), r"rows\.jsonl: line 2 is longer than 4 MiB", id="long"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(ConfigError, match="data.train: .*" + told):
        dataset(tmp_path, '{"prompt": "fine"}', line)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no rows"):
        dataset(tmp_path, "", "")
    with pytest.raises(ConfigError, match="there is no file 'nowhere'"):
        problems(train="nowhere")
    with pytest.raises(ConfigError, match=r"data\.train is empty"):
        problems(train="")


def test_prompts_are_all_of_one_kind(tmp_path: Path) -> None:
    """Text and messages in one file: both places are named."""
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:2: the prompt is a list .* of .*:1 is text"
    ):
        dataset(tmp_path, {"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]})


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    """Also inside of others; the named ones alone are metadata."""
    row = {"q": "1+1=", "out": {"gold": 2, "x": 1}, "level": 3, "rest": None}
    columns = ColumnsSection(prompt="q", answer="out.gold", metadata=("level",))
    found = dataset(tmp_path, row, columns=columns).row(0)
    assert ("1+1=", "2", '{"level": 3}') == (found.prompt, found.answer, found.metadata)


@pytest.mark.parametrize(
    ("preset", "row", "answer"),
    [
        ("verl", {"prompt": CHAT, "reward_model": {"ground_truth": "4"}}, "4"),
        ("trl", {"prompt": "?", "solution": "5"}, "5"),
        ("trl", {"prompt": "?", "answer": "6"}, "6"),
        ("gsm8k", {"question": "?", "answer": "3 + 4 = 7\n#### 7"}, "7"),
        ("verifiers", {"question": "?", "answer": "8"}, "8"),
    ],
)  # fmt: skip
def test_presets_know_the_columns_of_others(
    tmp_path: Path, preset: str, row: dict[str, object], answer: str
) -> None:
    """Data sets made for other systems are read as they are."""
    assert answer == dataset(tmp_path, row, preset=preset).row(0).answer


def test_an_answer_that_is_null_is_refused_where_answers_are_wanted(tmp_path: Path) -> None:
    """As text it would be `null`; where no column is named, rows need no answer."""
    rows = [{"prompt": "?", "gold": 1}, {"prompt": "?!", "gold": None}]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: `gold` is null: fill it in, or leave"):
        dataset(tmp_path, *rows, columns=ColumnsSection(answer="gold"))
    assert 2 == len(dataset(tmp_path, {"prompt": "?"}, {"prompt": "?!", "answer": None}))


def test_a_missing_column_lists_what_is_there(tmp_path: Path) -> None:
    """And says which field of the configuration names it."""
    told = (
        r"rows\.jsonl:1: no `question` \(fields: answer, prompt\); name it: data\.columns\.prompt"
    )
    with pytest.raises(ConfigError, match=told):
        dataset(tmp_path, {"prompt": "?", "answer": "3"}, preset="gsm8k")
    told = r"rows\.jsonl:1: no `gold` \(fields: prompt\); name it: data\.columns\.answer"
    with pytest.raises(ConfigError, match=told):
        dataset(tmp_path, {"prompt": "?"}, columns=ColumnsSection(answer="gold"))
    told = r"rows\.jsonl:2: data\.columns\.answer_pattern .* is not in the answer \"7\""
    rows = [{"question": "?", "answer": "#### 7"}, {"question": "?!", "answer": "7"}]
    with pytest.raises(ConfigError, match=told):
        dataset(tmp_path, *rows, preset="gsm8k")


@pytest.mark.parametrize(
    ("pattern", "told"), [("(", "unterminated subpattern"), ("a+", "has no group: put")]
)
def test_a_pattern_that_cannot_cut_is_refused(tmp_path: Path, pattern: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.columns\.answer_pattern: .*{told}"):
        dataset(tmp_path, {"prompt": "?"}, columns=ColumnsSection(answer_pattern=pattern))


def test_prompts_are_dressed(tmp_path: Path) -> None:
    """System prompt and solved problems make a chat of text; without the first it stays text."""
    shots = (Example(prompt="1+1=", answer="2"),)
    row = {"prompt": "2+2="}
    text = dataset(tmp_path, row, few_shot=shots, few_shot_join="\n").row(0)
    assert "1+1=2\n2+2=" == text.prompt
    chat = dataset(tmp_path, row, few_shot=shots, system_prompt="Be brief.").row(0)
    assert [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
    ] == chat.prompt
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "?"}]
    assert own == dataset(tmp_path, {"prompt": own}, system_prompt="Be brief.").row(0).prompt
    assert [{"role": "user", "content": "2+2="}] == dataset(tmp_path, row, chat="always").row(
        0
    ).prompt


def test_prompts_of_another_length_are_left_out_and_counted(tmp_path: Path) -> None:
    """Both ends; what stays is numbered anew; nothing left is an error with the counts."""
    rows = [{"prompt": "x" * length} for length in (2, 5, 9, 4)]
    file = write(tmp_path, *rows)
    found = problems(train=file, min_prompt_tokens=3, max_prompt_tokens=8)
    assert ["xxxxx", "xxxx"] == everything(found.train)
    parts = "2 for training, 1 skipped as too short, 1 skipped as too long"
    assert [f"{file}: 4 rows: {parts}"] == found.summary
    other = {
        "train": file,
        "held_out": write(tmp_path, {"prompt": "yyyyy"}, {"prompt": "y"}, name="o"),
    }
    told = problems(**other, min_prompt_tokens=2).summary
    assert [f"{file}: 4 rows for training", "2 rows: 1 to evaluate on, 1 skipped as too short"] == [
        told[0], told[1].partition(": ")[2]
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="4 rows: 4 skipped as too short; none is left"):
        problems(train=file, min_prompt_tokens=30)
    with pytest.raises(ConfigError, match=r":3: prompt of 9 tokens; .*data\.max_prompt_tokens = 7"):
        problems(8, train=file)


class Bytes(Characters):
    """A token per byte, and as many special ones as a tokenizer may add."""

    def encode_prompt(self, prompt: PromptText) -> list[int]:
        assert isinstance(prompt, str)
        return [*prompt.encode(), *[0] * SPARE_TOKENS]


@pytest.mark.parametrize("shots", [(), (Example(prompt="1+1=", answer="two, of course"),)])
@pytest.mark.parametrize(("most", "longest"), [(90, None), (90, 80), (60, 100), (90, 91)])
def test_what_is_left_out_is_left_out_by_its_tokens(
    tmp_path: Path, shots: tuple[Example, ...], most: int, longest: int | None
) -> None:
    """To the last one, dressed and with special ones; counting may be spared, never guessed."""
    prompts = ["x" * length for length in range(1, 100)] + ["é" * n for n in range(1, 50)]
    data = DataSection(
        train=write(tmp_path, *({"prompt": prompt} for prompt in prompts)),
        max_prompt_tokens=most,
        few_shot=shots,
    )
    found = everything(open_problems(data, Bytes(), longest).train)
    dress = "".join(f"{shot.prompt}{shot.answer}{data.few_shot_join}" for shot in shots)
    limit = min(most, longest - 1 if longest else most)
    fits = [p for p in prompts if len(Bytes().encode_prompt(dress + p)) <= limit]
    assert [dress + p for p in fits] == found


def test_a_run_has_the_rows_that_it_began_with(tmp_path: Path) -> None:
    """Whatever becomes of the file; its hash, and with it the next start, is another one."""
    file = write(tmp_path, {"prompt": "aaa"}, {"prompt": "bbb"})
    found, before = problems(train=file), data_hashes(DataSection(train=file))
    write(tmp_path, {"prompt": "c"})
    assert ["aaa", "bbb"] == everything(found.train)
    assert before != data_hashes(DataSection(train=file))


def test_a_file_that_is_written_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """What was read is neither the one nor the other."""

    class Writer(Characters):
        def encode_prompt(self, prompt: PromptText) -> list[int]:
            write(tmp_path, {"prompt": "bbb"})
            return super().encode_prompt(prompt)

    data = DataSection(train=write(tmp_path, {"prompt": "aaa"}), min_prompt_tokens=1)
    with pytest.raises(ConfigError, match=r"rows\.jsonl was written while it was read"):
        open_problems(data, Writer(), None)


def test_first_rows_need_no_pass(tmp_path: Path) -> None:
    """What lies behind them is not looked at."""
    file = write(tmp_path, {"prompt": "a"}, "not json")
    assert ["a"] == [row.prompt for row in first_rows(DataSection(train=file), 1)]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2:1: not a line of JSON"):
        first_rows(DataSection(train=file), 2)


def test_a_template_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.template: cannot read '.*no\.jinja'"):
        dataset(tmp_path, {"prompt": "a"}, template=str(tmp_path / "no.jinja"))
