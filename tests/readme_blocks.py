"""A page as a test sees it: fenced blocks, what each is for, headings, and the tree of files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUNNABLE = ("bash", "python", "toml")
SHOWN = ("", "text", "json", "mermaid")  # output and pictures
COMMANDS = ("rlstreams ", "make ", "$ ")  # what begins so is not for showing
RUN_IN_SHELL = ("rlstreams ", "python infra/examples/")  # what a block of bash may begin with
MAKES_RUN = "rlstreams.run("  # in a block of Python
COVERED = "make run"  # what tests/e2e/test_demo.py does in short form
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
_FENCE = re.compile(r"^```(\S*)\s*$")
_BRANCHES = " \t│├└─|`+-"


class ReadmeError(Exception):
    """A block that is neither runnable nor marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    line: int  # of the opening fence, from 1
    not_run: str = ""  # the reason, from the comment right before it

    @property
    def name(self) -> str:
        """For a test's id."""
        return f"line-{self.line}-{self.language or 'none'}"

    @property
    def first_line(self) -> str:
        """What says whose it is."""
        return self.text.partition("\n")[0].strip()

    @property
    def saved_as(self) -> str:
        """The file that the block is, if its first line is a comment with a file's name."""
        match = re.fullmatch(r"# ([\w./-]+\.(?:py|toml))\b.*", self.first_line)
        return match[1] if match else ""

    @property
    def is_tree(self) -> bool:
        """Whether it lists the folders of the repository."""
        names = {line.strip(_BRANCHES).split(" ")[0] for line in self.text.splitlines()}
        return {"schemas/", "streams/", "workers/"} <= names


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page.

    Raises:
        ReadmeError: a block that is not closed.
    """
    found: list[Block] = []
    lines = text.splitlines()
    rest = enumerate(lines)
    for index, line in rest:
        opening = _FENCE.match(line)
        if opening is None:
            continue
        body: list[str] = []
        for _, inner in rest:
            if inner.rstrip() == "```":
                break
            body.append(inner)
        else:
            raise ReadmeError(f"the block at line {index + 1} is not closed")
        mark = _NOT_RUN.fullmatch(lines[index - 1].strip()) if index else None
        found.append(
            Block(
                language=opening[1],
                text="\n".join(body) + "\n",
                line=index + 1,
                not_run=mark[1] if mark else "",
            )
        )
    return found


def anchors(text: str) -> set[str]:
    """What a link may name behind `#`: a page's headings, as viewers of Markdown spell them."""
    hidden: set[int] = set()
    for block in blocks(text):
        hidden |= set(range(block.line, block.line + block.text.count("\n") + 1))
    return {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).strip().lower().replace(" ", "-")
        for index, line in enumerate(text.splitlines(), start=1)
        if line.startswith("#") and index not in hidden
    }


def to_run(found: Sequence[Block]) -> list[Block]:
    """The blocks that a test executes, in the order of the page.

    Raises:
        ReadmeError: a block that none of the rules knows.
    """
    return [block for block in found if _is_run(block)]


def _is_run(block: Block) -> bool:
    is_shown = block.language in SHOWN and not block.first_line.startswith(COMMANDS)
    if block.not_run or block.is_tree or is_shown:
        return False
    if block.language not in RUNNABLE:
        raise ReadmeError(
            f"line {block.line}: a block of language {block.language!r} that begins with "
            f"{block.first_line!r}; what can run is one of {RUNNABLE}"
        )
    if block.language == "bash" and block.first_line.startswith(COVERED):
        return False
    if block.language == "bash" and not block.first_line.startswith(RUN_IN_SHELL):
        raise ReadmeError(
            f"line {block.line}: nothing runs a block that begins with {block.first_line!r}; "
            "put `<!-- not run: reason -->` on the line before it"
        )
    return True


def tree(block: Block) -> Iterator[tuple[str, str]]:
    """Path and description of each line of the tree, the path from its root."""
    parents: list[tuple[int, str]] = []  # column of the name, path
    for line in block.text.splitlines():
        entry = line.lstrip(_BRANCHES)
        if not entry:
            continue
        column = len(line) - len(entry)
        name, _, description = entry.partition(" ")
        while parents and parents[-1][0] >= column:
            parents.pop()
        path = (parents[-1][1] if parents else "") + name
        if name.endswith("/"):
            parents.append((column, path))
        yield path, description.strip(" #")


def tree_problems(block: Block, root: Path) -> list[str]:
    """Entries that do not exist, come twice, or say nothing; a name may be a pattern."""
    problems: list[str] = []
    seen: set[str] = set()
    for path, description in tree(block):
        if not list(root.glob(path.rstrip("/"))):
            problems.append(f"{path} does not exist")
        if path in seen:
            problems.append(f"{path} comes twice")
        if not description:
            problems.append(f"{path} has no description")
        seen.add(path)
    return problems


def schemas_page() -> dict[str, Any]:
    """What the Python blocks of `rlstreams/schemas/README.md` define, without our code."""
    text = (Path(__file__).parents[1] / "rlstreams/schemas/README.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert not re.search(r"^(from|import) (rlstreams|torch)", code, re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope
