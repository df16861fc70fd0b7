"""What `try` found, and the lines that it prints of it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlstreams.up.live.words import visible
from rlstreams.workers.dataset.row import Row
from rlstreams.workers.sandbox.reward import Judgement

Decode = Callable[[Sequence[int]], str]
_INDENT = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, and what became of it."""

    text: str  # of the last turn
    before: Sequence[Mapping[str, str]] = ()  # turns before it: author and text
    token_ids: Sequence[int] = ()
    finish_reason: str = "stop"
    judgement: Judgement | None = None
    rejected: str = ""  # why a run would set the sample aside; empty: it would not
    note: str = ""  # what the reward alone does not say
    judge_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRow:
    """A row with its answers."""

    row: Row
    prompt_ids: Sequence[int]
    left_out: str = ""  # why a run would not issue the row; then there are no answers
    completions: Sequence[Completion] = ()


@dataclass(slots=True)
class Times:
    """Where the time went, seconds."""

    load_s: float = 0.0
    sample_s: float = 0.0
    num_tokens: int = 0
    judge_s: list[float] = field(default_factory=list)


def row_lines(tried: TriedRow, index: int, total: int, decode: Decode) -> list[str]:
    """A row: the prompt as the model sees it, the answer wanted, the answers given."""
    lines = [
        f"row {index} of {total}  {tried.row.place}",
        *_block(f"prompt, {len(tried.prompt_ids)} tokens", decode(tried.prompt_ids)),
    ]
    if tried.row.answer:
        lines += _block("answer wanted", tried.row.answer)
    if tried.row.metadata not in ("", "{}"):
        lines += _block("metadata", tried.row.metadata)
    if tried.left_out:
        return [*lines, f"  LEFT OUT: {tried.left_out}", ""]
    for number, completion in enumerate(tried.completions, 1):
        for turn, said in enumerate(completion.before):
            who = f"completion {number}, turn {turn // 2 + 1}"
            lines += _block(who if said["author"] == "policy" else "  environment", said["text"])
        size = f"{len(completion.token_ids)} tokens, {completion.finish_reason}"
        lines += _block(f"completion {number}, {size}", completion.text)
        lines.append(f"  {verdict(completion)}")
    return [*lines, ""]


def verdict(completion: Completion) -> str:
    """What an answer earned, by parts, or why it would be set aside."""
    if completion.judgement is None:
        return f"SET ASIDE: {completion.rejected}"
    parts = "".join(f"  {name} {value:g}" for name, value in completion.judgement.parts.items())
    note = f"  ({completion.note})" if completion.note else ""
    why = completion.judgement.note
    return (
        f"reward {completion.judgement.reward:g}{parts}  [{1000 * completion.judge_s:.1f} ms]{note}"
        f"{f'  {_short(why)!r}' if why else ''}"
    )


def summary(rows: Sequence[TriedRow], times: Times) -> list[str]:
    """How it looks altogether: is there something to learn, and where does the time go."""
    completions = [c for row in rows for c in row.completions]
    rewards = [c.judgement.reward for c in completions if c.judgement is not None]
    lines = []
    if rewards:
        lines.append(f"{len(rewards)} answers, mean reward {statistics.mean(rewards):.2f}")
    if aside := len(completions) - len(rewards):
        lines.append(f"{aside} of {len(completions)} answers would be dead-lettered")
    if flat := sum(_is_flat(row) for row in rows):
        lines.append(
            f"{flat} of {len(rows)} rows get the same reward for every answer: such a group gives "
            "no gradient; more --samples or another temperature may separate them"
        )
    rate = times.num_tokens / times.sample_s if times.sample_s else 0.0
    judge_ms = 1000 * statistics.mean(times.judge_s) if times.judge_s else 0.0
    lines.append(
        f"{times.load_s:.1f} s to load the model, {times.sample_s:.1f} s to sample "
        f"{times.num_tokens} tokens ({rate:,.0f} a second), {judge_ms:.1f} ms per reward"
    )
    return lines


def _is_flat(row: TriedRow) -> bool:
    rewards = {c.judgement.reward for c in row.completions if c.judgement is not None}
    return len(row.completions) > 1 and len(rewards) == 1


def _block(title: str, text: str) -> list[str]:
    """One line if the text is one, else indented below its title."""
    rows = visible(text).split("\n")
    if len(rows) == 1:
        return [f"  {title}: {text}"]
    return [f"  {title}:", *(f"{_INDENT}{row}" for row in rows)]


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
