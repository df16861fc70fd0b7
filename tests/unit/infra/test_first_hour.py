"""The script of the first hour on a GPU: what it takes from the page, and how it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import first_hour
from tests.gpu.first_hour import PAGE, as_asked, lines_of, parse, walked

TEXT = PAGE.read_text("utf-8")


def asked(*words: str) -> list[str]:
    """What is run for each line of the page."""
    args = parse([*words, "--out", "out.json"])
    return [found for line in lines_of(TEXT) if (found := as_asked(line, args))]


def test_without_an_exception_every_line_is_run_as_it_is_written() -> None:
    lines = lines_of(TEXT)
    assert lines == asked()
    assert all(line in TEXT for line in lines)


@pytest.mark.parametrize(
    ("words", "gone", "new"),
    [
        (["--model", "/m/gemma"], "--model hf:Qwen/Qwen2.5-0.5B-Instruct", "--model /m/gemma"),
        (["--rows", "/d/train.jsonl"], "--from gsm8k", "--from /d/train.jsonl"),
        (["--steps", "7"], "--steps 100", "--steps 7"),
        (["--cpu", "--model", "/m/gemma"], " --gpus 1", ""),
    ],
)
def test_an_exception_changes_its_own_words_alone(words: list[str], gone: str, new: str) -> None:
    usual = "--model /m/gemma" if "--cpu" in words else "--model hf:Qwen/Qwen2.5-0.5B-Instruct"
    expected = "\n".join(lines_of(TEXT)).replace("--model hf:Qwen/Qwen2.5-0.5B-Instruct", usual)
    assert gone in expected
    assert expected.replace(gone, new).splitlines() == asked(*words)


def test_what_installs_is_left_out_on_demand() -> None:
    """And nothing else: all that is left is the project and its run."""
    left = asked("--skip-install")
    assert lines_of(TEXT)[-len(left) :] == left
    assert left[0].startswith("rlstreams init ")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("rlstreams audit ", "rlstreams report ", "does not run rlstreams audit"),
        ("| to change |", "```bash\nls\n```\n| to change |", "has 2 blocks of bash"),
    ],
)
def test_a_page_that_cannot_be_walked(old: str, new: str, told: str) -> None:
    assert old in TEXT
    with pytest.raises(ValueError, match=told):
        lines_of(TEXT.replace(old, new))


def test_an_exception_that_meets_nothing_is_named() -> None:
    args = parse(["--rows", "mine.jsonl", "--out", "out.json"])
    with pytest.raises(ValueError, match=r"--rows: .*rlstreams init math --gpus 1"):
        as_asked("rlstreams init math --gpus 1", args)


def test_lines_share_a_shell_and_go_on_behind_the_last_that_passed(tmp_path: Path) -> None:
    """Over two calls: folder and environment last, a line that passed is not run again."""
    args = parse(["--folder", str(tmp_path), "--out", "out.json"])
    begin = ["mkdir in; cd in", "export WORD=kept; echo x >> ../count", "test -e ../mended"]
    end = [*begin, 'echo "$WORD" > said']

    def walk(lines: Sequence[str]) -> bool:
        return walked(args, lines, tmp_path / "no-run")

    assert not walk(end)
    assert not (tmp_path / "in/said").exists()
    (tmp_path / "mended").touch()
    assert walk(end)
    assert "kept\n" == (tmp_path / "in/said").read_text("utf-8")
    assert "x\n" == (tmp_path / "count").read_text("utf-8")


@pytest.mark.parametrize(
    ("curve", "num_steps", "audit_ok", "wrong"),
    [
        ([0.20, 0.28, 0.31, 0.34], 4, True, []),
        ([0.20, 0.40, 0.22, 0.23], 4, True, ["held-out accuracy rose by at least 0.1"]),
        ([0.20], 4, True, ["held-out accuracy rose by at least 0.1"]),
        ([0.20, 0.28, 0.31, 0.34], 3, True, ["the run went to its end"]),
        ([0.20, 0.28, 0.31, 0.34], 4, False, ["the audit is clean"]),
    ],
)
def test_what_is_asked_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
    curve: list[float],
    num_steps: int,
    audit_ok: bool,
    wrong: list[str],
) -> None:
    """The end is the mean of the last three points; the clock starts behind the first step, and
    stands still between two trainers."""
    given = dict.fromkeys(first_hour.TOLD, 0)
    given |= {"accuracy": [[at, mean, 64] for at, mean in enumerate(curve)], "steps": num_steps}
    given |= {"step_ends_s": [10.0 + 2 * at for at in range(num_steps)], "audit_ok": audit_ok}
    given |= {"epochs": [1] * 2 + [2] * (num_steps - 2)}
    config = SimpleNamespace(trainer=SimpleNamespace(steps=4))
    monkeypatch.setattr(first_hour, "configuration", lambda *_: config)
    monkeypatch.setattr(first_hour, "told_by_the_log", lambda _: given)
    told = first_hour.told_of(Path("run"), 0.1)
    assert wrong == [name for name, is_so in told["checks"].items() if not is_so]
    expected = [0.0, 0.0, 2.0, 2.0, 4.0][: min(len(curve), num_steps + 1)]
    assert expected == [point["gpu_s"] for point in told["curve"]]
