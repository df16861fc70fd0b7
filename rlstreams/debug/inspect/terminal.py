"""Samples on a terminal, drawn by rich.

A run's words are put into `Text`: rich would read a plain string as markup, in which the token
`[/INST]` is an error and `[i]` vanishes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rlstreams.streams.samples.life import Outcome
from rlstreams.words.sample_detail import LifeEvent, SampleDetail
from rlstreams.words.screen import clock_text, number, visible
from rlstreams.words.texts import as_lines, parts_line, short

AUTHOR_STYLES = {"prompt": "bright_black", "environment": "magenta"}
VERSION_STYLES = ("cyan", "magenta", "yellow", "blue", "green")
_OUTCOMES = {
    Outcome.TRAINED: "green",
    Outcome.EVALUATED: "green",
    Outcome.DROPPED: "red",
    Outcome.DEAD: "red",
    Outcome.ABSENT: "red",
}
WIDE = 120  # columns of a terminal that has room for a column of places in the log
_WORST = 5  # tokens
_SIBLING = 38  # fewest columns of one answer beside others


def whole(detail: SampleDetail, width: int = WIDE) -> RenderableType:
    """One sample: figures, tokens colored by version, its worst tokens, its lineage."""
    parts: list[RenderableType] = [
        Rule(Text(f" {detail.lineage.sample} ", "bold"), align="left", style="bright_black"),
        _figures(detail),
    ]
    if detail.tokens is not None:
        parts += [_heading("tokens"), _legend(detail), Padding(_tokens(detail), (0, 2))]
        parts += [_worst(detail)] if detail.worst_tokens(1) else []
    if detail.lineage.rollout is not None and (why := detail.lineage.rollout.reward_note):
        parts += [_heading("why that reward"), Padding(_said(why), (0, 2))]
    if detail.problem:
        parts.append(_said(detail.problem, "red"))
    parts += [_heading("lineage"), _lineage(detail, is_wide=width >= WIDE)]
    if detail.lineage.copies:
        rest = ", ".join(map(str, detail.lineage.copies))
        parts.append(Text(f"later records of the same sample, which nobody uses: {rest}", "yellow"))
    if detail.note:
        parts.append(Text(detail.note, "yellow"))
    return Group(*parts)


def table(details: Sequence[SampleDetail], title: str, width: int = WIDE) -> RenderableType:
    """A row for each sample: prompt, answer, reward and its parts; on a wide terminal its figures
    too."""
    is_wide = width >= WIDE
    drawn = Table(box=None, pad_edge=False, header_style="bright_black", expand=True)
    drawn.title, drawn.title_justify = _said(title, "bold"), "left"
    drawn.add_column("sample", no_wrap=True)
    drawn.add_column("outcome", no_wrap=is_wide)
    for name in _IN_A_ROW if is_wide else ("reward",):
        drawn.add_column(name, justify="right", no_wrap=True)
    if any(_parts(detail) for detail in details):
        drawn.add_column("parts", max_width=width // 4, overflow="fold")
    for name, ratio in (("prompt", 2), ("answer", 3)):
        drawn.add_column(name, ratio=ratio, overflow="fold")
    for detail in details:
        drawn.add_row(*_cells(detail, is_wide=is_wide, has_parts=len(drawn.columns)))
    return drawn


FIGURES = ("step", "reward", "mismatch", "staleness", "tokens", "versions")
_IN_A_ROW = FIGURES[1:]  # the outcome has the step


def _cells(detail: SampleDetail, *, is_wide: bool, has_parts: int) -> list[Text]:
    found = [Text(str(detail.lineage.sample), "bold")]
    shown = [Text(value) for value in figures(detail)][1:]
    after = Text(detail.lineage.after, _OUTCOMES.get(detail.lineage.outcome, "yellow"))
    found += [after, *(shown if is_wide else shown[:1])]
    texts = [Text(visible(short(text))) for text in (_asked(detail), _answered(detail))]
    if has_parts == len(found) + 3:
        found.append(Text(_parts(detail), "bright_black"))
    return [*found, *texts]


def _asked(detail: SampleDetail) -> str:
    prompt = detail.lineage.prompt
    return prompt.event.text if prompt is not None else detail.said_by("prompt")


def _answered(detail: SampleDetail) -> str:
    return as_lines([turn for turn in detail.turns() if turn[0] != "prompt"])


def _parts(detail: SampleDetail) -> str:
    rollout = detail.lineage.rollout
    return parts_line(rollout.reward_parts) if rollout is not None else ""


def siblings(details: Sequence[SampleDetail], title: str, width: int) -> RenderableType:
    """The answers of one group side by side, under their prompt."""
    across = max(1, min(len(details), width // _SIBLING))
    panels = []
    for detail in details:
        reward = figures(detail)[FIGURES.index("reward")]
        parts = f" ({_parts(detail)})" if _parts(detail) else ""
        name = Text.assemble((f"{detail.lineage.sample} ", "bold"), f"reward {reward}{parts}")
        panels.append(Panel(_said(_answered(detail)), title=name, title_align="left"))
    rows = Table.grid(expand=True)
    for _ in range(across):
        rows.add_column(ratio=1)
    for start in range(0, len(panels), across):
        rows.add_row(*panels[start : start + across])
    return Group(_said(title, "bold"), _said(_asked(details[0])), rows)


def figures(detail: SampleDetail) -> tuple[str, ...]:
    """Step, reward, mismatch, staleness, number of sampled tokens and versions, as text."""
    lineage, rollout = detail.lineage, detail.lineage.rollout
    return (
        "-" if lineage.trained is None else str(lineage.trained.step.step),
        "-" if rollout is None else f"{rollout.reward:g}",
        "-" if math.isnan(detail.mismatch) else number(detail.mismatch),
        ",".join(map(str, sorted(set(detail.staleness)))) or "-",
        str(detail.num_sampled) if detail.tokens is not None else "-",
        ",".join(map(str, detail.versions)) or "-",
    )


def _outcome(detail: SampleDetail) -> Text:
    outcome = detail.lineage.outcome
    return Text(str(outcome), _OUTCOMES.get(outcome, "yellow"))


def _said(words: str, style: str = "") -> Text:
    return Text(visible(words), style)


def _heading(name: str) -> Text:
    return Text(f"\n{name}", "bold")


def _figures(detail: SampleDetail) -> Text:
    line = _outcome(detail)
    for name, value in zip(FIGURES, figures(detail), strict=True):
        if value != "-":
            line += Text.assemble("   ", (f"{name} ", "bright_black"), value)
    trained, prompt = detail.lineage.trained, detail.lineage.prompt
    if trained is not None:
        advantage = f"{trained.ref.advantage:+.3f}"
        line += Text.assemble("   ", ("advantage ", "bright_black"), advantage)
    if parts := _parts(detail):
        line += Text.assemble("   ", ("parts ", "bright_black"), parts)
    if prompt is not None and prompt.event.answer:
        line += Text.assemble("   ", ("expected ", "bright_black"), visible(prompt.event.answer))
    return line


def _legend(detail: SampleDetail) -> Text:
    line = Text("  ")
    for version in detail.versions:
        line += Text.assemble((f"version {version}", _version_style(detail, version)), "  ")
    return line


def _version_style(detail: SampleDetail, version: int) -> str:
    return VERSION_STYLES[detail.versions.index(version) % len(VERSION_STYLES)]


def _tokens(detail: SampleDetail) -> Text:
    tokens = detail.tokens
    assert tokens is not None
    text = Text()
    for at, word in enumerate(detail.words):
        author = tokens.authors[int(tokens.segment_N[at])]
        style = AUTHOR_STYLES.get(author, "")
        if author == "policy":
            style = _version_style(detail, int(tokens.version_N[at]))
        text.append(visible(word), style)
    return text


def _worst(detail: SampleDetail) -> RenderableType:
    tokens = detail.tokens
    assert tokens is not None
    drawn = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bright_black")
    drawn.add_column("  largest differences: token")
    for name in ("word", "version", "behavior", "proximal", "difference", "ratio"):
        drawn.add_column(name, justify="left" if name == "word" else "right")
    for at in detail.worst_tokens(_WORST):
        gap = float(tokens.difference_N[at])
        drawn.add_row(
            f"  {at}", Text(repr(detail.words[at])), str(tokens.version_N[at]),
            f"{tokens.behavior_N[at]:.5f}", f"{tokens.proximal_N[at]:.5f}", f"{gap:+.2e}",
            f"{math.exp(min(gap, 700.0)):.4f}",
        )  # fmt: skip
    return drawn


def _lineage(detail: SampleDetail, *, is_wide: bool) -> RenderableType:
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in ("  time (UTC)", "after", "role", "what"):
        drawn.add_column(name, no_wrap=True, justify="right" if name == "after" else "left")
    drawn.add_column("how", ratio=1)
    if is_wide:
        drawn.add_column("where", no_wrap=True, style="bright_black")
    before: LifeEvent | None = None
    for stage in detail.stages:
        after = "" if before is None else seconds_text((stage.at_ms - before.at_ms) / 1000)
        style = "" if stage.is_own else "bright_black"
        where = "" if stage.position is None else str(stage.position)
        how = f"{stage.detail}  {where}".rstrip() if not is_wide else stage.detail
        drawn.add_row(
            f"  {clock_text(stage.at_ms)}", after if stage.is_own else "", _said(stage.role),
            _said(stage.what, "bold" if stage.is_own else ""), _said(how),
            *([where] if is_wide else []), style=style,
        )  # fmt: skip
        before = stage if stage.is_own else before
    return drawn


def seconds_text(seconds: float) -> str:
    """`+0.120 s`, `+12.3 s`, `+3 min`."""
    if abs(seconds) < 10:
        return f"{seconds:+.3f} s"
    return f"{seconds:+.1f} s" if abs(seconds) < 120 else f"{seconds / 60:+.0f} min"
