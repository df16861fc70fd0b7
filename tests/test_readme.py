"""README and `infra/docs` are true: blocks run, links lead somewhere, the tree is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import COMMAND_S, ROOT, Workspace
from tests.readme_blocks import (
    MAKES_RUN,
    Block,
    ReadmeError,
    anchors,
    blocks,
    to_run,
    tree_problems,
)

README = ROOT / "README.md"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in (README, *sorted((ROOT / "infra/docs").glob("*.md")))
}
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)")
LONGEST_README = 180  # lines: it is a first page

each_page = pytest.mark.parametrize("page", PAGES)


def block(language: str, text: str, **changes: object) -> Block:
    return Block(**{"language": language, "text": text, "line": 1, **changes})  # type: ignore[arg-type]


@each_page
def test_every_block_is_run_or_says_why_not(page: str) -> None:
    """Nothing on a page is skipped in silence."""
    to_run(blocks(PAGES[page]))


def test_the_readme_is_a_first_page() -> None:
    """Its first command is `make run`; it stays short, and names every page that is longer."""
    text = PAGES["README.md"]
    first = next(block for block in blocks(text) if block.language == "bash")
    assert first.first_line.startswith("make run")
    assert len(text.splitlines()) <= LONGEST_README
    assert [] == [page for page in PAGES if page != "README.md" and f"({page})" not in text]


def test_make_run_is_what_the_end_to_end_test_runs() -> None:
    """The block that is not executed here stands for the same command."""
    done = subprocess.run(
        ["make", "-n", "run", "ARGS=--steps 12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"rlstreams up infra/examples/demo\.toml .*--steps 12", done.stdout)


def test_the_tool_of_the_page_answers_calls_and_leaves_answers_to_the_verifier() -> None:
    (shown,) = [
        b
        for b in blocks(PAGES["infra/docs/several-turns.md"])
        if "Adder" in b.text and b.language == "python"
    ]
    page: dict[str, Any] = {}
    exec(shown.text, page)
    step = page["Adder"]("2+3=", "5", {}).step
    asked = '<tool_call>{"name": "add", "arguments": {"numbers": [2, 3]}}</tool_call>'
    assert [{"role": "tool", "content": "5"}] == step(asked, asked)
    (broken,) = step("", "<tool_call>{</tool_call>")
    assert broken["content"].startswith("error: JSONDecodeError")
    assert step("5", "5<|im_end|>") is None


def test_the_tree_names_what_is_there() -> None:
    """One block lists the folders and files, each with a description."""
    (listed,) = [b for b in blocks(PAGES["README.md"]) if b.is_tree]
    assert [] == tree_problems(listed, ROOT)


def test_each_case_of_bad_input_names_a_test_that_is_there() -> None:
    """The map in `tests/README.md` outlives no test that it points to."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "tests/README.md").read_text())
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, name in named
        if f"def {name}" not in (ROOT / path).read_text("utf-8")
    ]
    assert [] == missing


@each_page
def test_links_and_pictures_lead_to_files_and_headings(page: str) -> None:
    """Everything that a page points at inside of the repository is there."""
    missing = []
    for name, anchor in LINK.findall(PAGES[page]):
        if "://" in name:
            continue
        target = (ROOT / page).parent / name if name else ROOT / page
        known = target.exists()
        if known and anchor:
            known = anchor in anchors(target.read_text("utf-8"))
        if not known:
            missing.append(f"{name}#{anchor}")
    assert [] == missing


@each_page
def test_no_gap_is_left_to_fill(page: str) -> None:
    """A lone word in capitals stands for a text that was to come."""
    assert [] == re.findall(r"^[A-Z]{4,}$", PAGES[page], re.MULTILINE)


def runnable() -> list[tuple[str, Block]]:
    """None where the first test fails: an error here would stop the whole collection."""
    try:
        return [(page, block) for page in PAGES for block in to_run(blocks(PAGES[page]))]
    except ReadmeError:
        return []


def case(page: str, block: Block) -> object:
    """A block that makes a whole run is run at night: `processes/api/test_run.py` has it by day."""
    marks = [pytest.mark.slow] if MAKES_RUN in block.text else []
    return pytest.param(block, id=f"{page}-{block.name}", marks=marks)


@pytest.mark.e2e
@pytest.mark.parametrize("shown", [case(page, block) for page, block in runnable()])
def test_the_block_runs(shown: Block, looked_at: Workspace, tmp_path: Path) -> None:
    """Beside a finished run; a block whose first line is a comment with a file's name is saved.

    A page's Python finds its run by `RLSTREAMS_RUN` (its folder) and `RLSTREAMS_RUN_ID`.
    """
    if shown.saved_as:
        file = looked_at.folder / shown.saved_as
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(shown.text, "utf-8")
    if shown.language == "toml":
        tomllib.loads(shown.text)
        return
    where = ["env", "RLSTREAMS_RUN=runs/demo", "RLSTREAMS_RUN_ID=demo"]
    # `doctor` is for what has not begun: beside a broker that runs it compares the run's topics.
    is_before = shown.first_line.startswith("rlstreams doctor")
    workspace = Workspace(tmp_path) if is_before else looked_at
    if shown.language == "python":
        done = workspace.run(*where, sys.executable, "-c", shown.text, timeout_s=COMMAND_S)
        assert 0 == done.returncode, done.stdout
        return
    for line in shown.text.splitlines():
        words = shlex.split(line, comments=True)
        done = workspace.here(*words[words[0] == "python" :])
        assert 0 == done.returncode, done.stdout


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (block("bash", "docker compose up\n"), "docker compose up"),
        (block("", "rlstreams up\n"), "language '' .*rlstreams up"),
        (block("shell", "rlstreams up\n"), "language 'shell'"),
    ],
)
def test_a_block_that_nothing_runs_is_refused(shown: Block, expected: str) -> None:
    with pytest.raises(ReadmeError, match=f"line 1: .*{expected}"):
        to_run([shown])


def test_an_open_block_is_refused() -> None:
    """Otherwise the rest of the page would be one block."""
    with pytest.raises(ReadmeError, match="line 1 is not closed"):
        blocks("```bash\nmake run\n")


def test_a_tree_that_is_wrong_names_each_entry(tmp_path: Path) -> None:
    """Missing, double and undescribed lines, in either style of drawing."""
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas/a.py").touch()
    text = "schemas/       events\n  a.py         one\n  *.avsc       none\n  a.py\n"
    drawn = "schemas/       events\n├── a.py       one\n├── *.avsc     none\n└── a.py\n"
    expected = [
        "schemas/*.avsc does not exist",
        "schemas/a.py comes twice",
        "schemas/a.py has no description",
    ]
    assert expected == tree_problems(block("text", text), tmp_path)
    assert expected == tree_problems(block("text", drawn), tmp_path)
