"""What `symptoms.toml` quotes can be seen: messages, metrics, names of fields and panes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import pytest

from rlstreams.workers.config.docs import field_docs
from tests.syntax_trees import MODULES, ROOT, is_within

QUOTED = re.compile(r"`([^`]+)`")
BLANK = "\0"  # what stands in an f-string's braces
# Of the user's own world, or of a page: nothing that we print.
NOT_OURS = frozenset(
    {"async def", "async def step", "enable_thinking", "q_proj|v_proj", "MemoryError"}
)
HEADINGS = {"What one GPU can train": "infra/docs/models.md"}


def texts_of(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Texts of a module without docstrings, and its names of values: some are metrics."""
    passed = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            passed |= {id(part) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else BLANK for v in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in passed:
                yield node.value
        elif isinstance(node, ast.Name) and node.id.islower():
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg


@pytest.fixture(scope="module")
def texts() -> str:
    """All of the sources' texts, one a line."""
    found: set[str] = set()
    for module in MODULES:
        if is_within(module.name, "rlstreams"):
            found |= {text.replace("\n", " ") for text in texts_of(module.nodes)}
    return "\n".join(sorted(found))


def quotes() -> Iterator[tuple[str, str]]:
    """Field and text, of each text between backticks."""
    for doc in field_docs():
        for text in QUOTED.findall(doc.symptom):
            yield doc.name, text


def is_said(text: str, texts: str) -> bool:
    """Whether one text of the sources holds its words; `...` stands for what differs each time."""
    pattern = r"[^\n]*".join(re.escape(part.strip()) for part in text.split("..."))
    return re.search(rf"(?<!\w){pattern}(?!\w)", texts) is not None


def test_each_quoted_symptom_is_in_the_code(texts: str) -> None:
    """Else nobody will ever see it: quote the message as the code has it."""
    fields = {doc.name for doc in field_docs()}
    known = NOT_OURS | HEADINGS.keys() | fields | {name.rpartition(".")[2] for name in fields}
    asked = [(name, text) for name, text in quotes() if text not in known]
    assert len(asked) > 30
    assert [] == [f"{name}: {text}" for name, text in asked if not is_said(text, texts)]


def test_each_heading_that_is_quoted_is_on_its_page() -> None:
    """And it is quoted somewhere."""
    quoted = {text for _, text in quotes()}
    for heading, page in HEADINGS.items():
        assert heading in quoted
        assert f"## {heading}\n" in (ROOT / page).read_text("utf-8")


@pytest.mark.parametrize(
    "text", ["no module named vllm", "a redone step has another hash", "no ... (felds: ...)"]
)
def test_a_text_that_nothing_prints_is_found(texts: str, text: str) -> None:
    """The first two were on the page."""
    assert not is_said(text, texts)
