"""What `try` prints of rows, answers and completions that were brought along."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.check.trial.sample import (
    Completion,
    Times,
    TriedRow,
    all_of,
    left_out,
    row_lines,
    spent,
    summary,
)
from rlstreams.words.screen import visible
from rlstreams.workers.config.data import DataSection
from rlstreams.workers.dataset.limits import PromptLimits
from rlstreams.workers.dataset.row import Row
from rlstreams.workers.sandbox.reward import Judgement
from tests import factories
from tests.unit.problems.rows import Characters

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "infra/examples/demo.toml"
ROW = Row(number=0, place="my.jsonl:1", prompt="1+1=", answer="2", metadata="{}")


def completion(reward: float | None, **changes: object) -> Completion:
    judgement = None if reward is None else Judgement(reward=reward, parts={"right": reward})
    given = {"text": "2", "token_ids": (5, 2), "judgement": judgement, "judge_s": 0.0004}
    return Completion(**{**given, **changes})  # type: ignore[arg-type]


def tried(*completions: Completion, left_out: str = "") -> TriedRow:
    return TriedRow(row=ROW, prompt_ids=(1, 4), completions=completions, left_out=left_out)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in token_ids)


def test_a_row_is_shown_as_the_model_sees_it() -> None:
    """Special tokens included; an answer with its reward and parts."""
    lines = row_lines(tried(completion(1.0)), 1, 3, decode)
    assert [
        "row 1 of 3  my.jsonl:1",
        "  prompt, 2 tokens: <1><4>",
        "  answer wanted: 2",
        "  completion 1, 2 tokens, stop: 2",
        "  reward 1  right 1  [0.4 ms]",
        "",
    ] == lines


@pytest.mark.parametrize(
    ("data", "num_tokens", "told"),
    [
        ({"min_prompt_tokens": 3}, 2, "too short: prompt of 2 tokens, data.min_prompt_tokens is 3"),
        ({"max_prompt_tokens": 4}, 5, "too long: prompt of 5 tokens, data.max_prompt_tokens is 4"),
        ({"max_prompt_tokens": 9}, 8, "too long: prompt of 8 tokens, the model takes at most 7"),
        ({}, 8, "`up` refuses the row: my.jsonl:1: prompt of 8 tokens; the model takes at most 7"),
        ({}, 7, ""),
    ],
)
def test_a_row_is_left_out_as_a_run_would(data: dict[str, int], num_tokens: int, told: str) -> None:
    """By the run's own rule and words: a model's length leaves a row out where a limit is set."""
    prompt = factories.prompt(token_ids=factories.int32s(num_tokens))
    limits = PromptLimits.of(DataSection(**data), Characters(), 8)
    (found,) = left_out(limits, [ROW], [prompt])
    assert (found.startswith(told), bool(found)) == (True, bool(told))


def test_what_a_run_would_reject_says_why() -> None:
    """A row that is not issued, a sample that is set aside, an answer that was cut."""
    assert "  LEFT OUT: too long" in row_lines(tried(left_out="too long"), 1, 1, decode)
    shown = tried(completion(None, rejected="r.py:3: boom"), completion(0.0, note="cut at 12"))
    lines = row_lines(shown, 1, 1, decode)
    assert "  SET ASIDE: r.py:3: boom" in lines
    assert "  reward 0  right 0  [0.4 ms]  (cut at 12)" in lines


def test_an_answer_of_many_lines_is_indented() -> None:
    """Its own lines stay lines."""
    lines = row_lines(tried(completion(1.0, text="a\nb")), 1, 1, decode)
    assert ["  completion 1, 2 tokens, stop:", "    a", "    b"] == lines[3:6]


def test_the_summary_says_whether_there_is_something_to_learn() -> None:
    """Rows whose answers all earn the same are counted, and so is what was set aside."""
    rows = [
        tried(completion(1.0), completion(0.0)),
        tried(completion(0.0), completion(0.0)),
        tried(completion(0.0), completion(None, rejected="no")),
    ]
    times = Times(import_s=7.0, load_s=2.0, sample_s=0.5, num_tokens=50, judge_s=[0.001, 0.003])
    answers, aside, flat = summary(rows)
    (took,) = spent(times)
    assert "5 answers, mean reward 0.20" == answers
    assert "1 of 6 answers would be dead-lettered" == aside
    assert flat.startswith("2 of 3 rows get the same reward for every answer")
    assert (
        "7.0 s to import torch and transformers, 2.0 s to load the model, 0.5 s to sample 50 "
        "tokens (100 a second), 2.0 ms per reward" == took
    )


def test_a_model_that_is_never_rewarded_is_said_to_learn_nothing() -> None:
    """With what to change; one answer that earned something ends that."""
    none, some = ([tried(completion(0.0), completion(last))] for last in (0.0, 0.5))
    assert any("no answer earned anything" in line for line in summary(none))
    assert not any("no answer earned anything" in line for line in summary(some))


def test_a_wrong_signature_is_shown_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With file, line, what it takes and what it is called with."""
    code = tmp_path / "mine.py"
    code.write_text("import math\n\n\ndef reward(completion):\n    return 1.0\n")
    assert 78 == main(["try", str(DEMO), f"--reward.verifier={code}:reward"])
    told = capsys.readouterr().err
    assert f"{code}:4: reward(completion) cannot be called with" in told
    assert "(prompt, completion, answer, metadata)" in told


def test_an_answer_does_not_steer_the_terminal() -> None:
    """It may hold what clears a screen; tabs and new lines are text."""
    assert "a\tb\\x1b[2Jc\\x07\nd\\x9b\\r" == visible("a\tb\x1b[2Jc\x07\nd\x9b\r")


def test_more_answers_than_a_screen_is_for_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is loaded, with both options and what to do."""
    assert 78 == main(["try", str(DEMO), "--rows", "10", "--samples", "5000"])
    told = capsys.readouterr().err
    assert "--rows 10 with --samples 5000 are 50,000 answers" in told
    assert "at most 4,096: lower one of them" in told


def test_slow_work_says_how_much_of_it_is_done() -> None:
    """Results come in the order of the work, however it ends."""
    said: list[str] = []
    gates = [asyncio.Event() for _ in range(3)]

    async def one(number: int) -> int:
        await gates[number].wait()
        if number:
            gates[number - 1].set()
        return number

    async def run() -> list[int]:
        gates[2].set()
        return await all_of(map(one, range(3)), "sampling", said.append)

    assert [0, 1, 2] == asyncio.run(run())
    assert ["sampling: 0 of 3", "sampling: 1 of 3", "sampling: 2 of 3"] == said
