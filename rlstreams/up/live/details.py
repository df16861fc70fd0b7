"""Panes of the live view for which only larger terminals have room, and those behind a key."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlstreams.streams.views.dead import list_command
from rlstreams.streams.views.pace import STEPS
from rlstreams.streams.views.workers import SILENT_S
from rlstreams.up.live.curve import KILL, Line
from rlstreams.up.live.panels import MARKER, NEXT_VERSION, figures_table, plotted
from rlstreams.up.live.words import LiveInput, number, visible

FIGURES = {"loss": "loss", "kl": "KL", "entropy": "entropy", "grad_norm": "gradient norm"}
"""What the second row of charts shows: metric of a step, and its title."""
_PART = "reward/"  # begins the name of a metric that is a part of the reward
_KEYS = {
    "?": "this page",
    "e": "what happened, dead letters",
    "Esc": "back to the run",
    "Ctrl-C": "drain; a second one kills",
    MARKER: "held-out accuracy",
    "\u2812": "reward of the batch",
    KILL: "a process was killed, or restarted",
    NEXT_VERSION: "a newer version goes on",
    "+1": "restarts of a worker",
    "v34": "policy version that it holds",
    "lag": "samples not finished yet",
    "staleness": "versions from sampling to training",
    "silent": f"no report for {SILENT_S:.0f} s",
}
"""Keys, and what marks and words mean; short, for a small terminal shows all."""


def figure(given: LiveInput, name: str, width: int, height: int) -> tuple[str, RenderableType]:
    """Title with the newest value, and the curve of one metric by step."""
    points = [
        (float(p.step), value)
        for p in given.views.run.steps
        if math.isfinite(value := p.loss if name == "loss" else p.metrics.get(name, math.nan))
    ]
    if not points:
        return FIGURES[name], Text("no step yet", style="bright_black")
    values = [y for _, y in points]
    low, high = min(values), max(values)
    span = (low, high) if high > low else (low - 0.5, high + 0.5)
    rows = plotted(given, [Line(points=points, style="cyan")], width, height, span)
    return f"{FIGURES[name]} {number(values[-1])}", Group(*rows)


def reward_parts(given: LiveInput) -> RenderableType:
    """Mean of each part of the reward over the first and the last steps."""
    steps = given.views.run.steps
    names = sorted({n for p in steps[-STEPS:] for n in p.metrics if n.startswith(_PART)})
    if not names:
        return Text("the reward is one number", style="bright_black")
    ends = steps[:STEPS], steps[-STEPS:]
    rows = [
        (
            n.removeprefix(_PART),
            *(number(sum(p.metrics.get(n, 0.0) for p in end) / len(end)) for end in ends),
        )
        for n in names
    ]
    return figures_table(("part", f"first {STEPS} steps", f"last {STEPS}"), rows)


def pulls(given: LiveInput, height: int) -> RenderableType:
    """The newest pulls of weights, the last one first."""
    found = given.views.pulls
    rows = [
        (p.worker, str(p.policy_version), f"{p.num_bytes / 1e6:,.1f} MB", f"{p.seconds:.2f} s",
         f"{p.paused_s:.2f} s")
        for p in reversed(found.newest)
    ]  # fmt: skip
    mean_s = found.seconds / max(1, found.num_pulls)
    total = Text(f"{found.num_pulls:,} pulls, {mean_s:.2f} s each", style="bright_black")
    titles = ("worker", "version", "size", "took", "paused")
    return Group(total, figures_table(titles, rows[: max(1, height - 2)]))


def memory(given: LiveInput) -> RenderableType:
    """Of each process on this machine, and what is left of the trainer's first GPU."""
    rows = [(p.worker, f"{p.memory_bytes / 1e6:,.0f} MB") for p in given.processes]
    parts: list[RenderableType] = [figures_table(("process", "memory"), rows)]
    steps = given.views.run.steps
    if steps and "gpu_free_gb" in steps[-1].metrics:
        free, retries = (
            steps[-1].metrics.get(n, 0.0) for n in ("gpu_free_gb", "gpu_alloc_retries")
        )
        parts.append(Text(f"trainer's GPU: {free:.1f} GB left, {retries:.0f} retries"))
    return Group(*parts)


def happened(events: Sequence[str], height: int) -> RenderableType:
    """The newest lines of what happened, the last one at the bottom."""
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in events[-max(1, height) :]]
    return Group(*lines) if lines else Text("nothing yet", style="bright_black")


def events_page(given: LiveInput, events: Sequence[str], height: int) -> RenderableType:
    """Dead letters by reason with their newest detail, and what happened."""
    dead = given.views.dead
    lines = [
        Text(f"{reason.num:,} {reason.reason}: {visible(reason.newest)}", "bold red", no_wrap=True,
             overflow="ellipsis")
        for reason in dead.reasons[: height // 2]
    ]  # fmt: skip
    lines.append(Text(list_command() if lines else "no dead letters", "bright_black"))
    return Group(*lines, Text(""), happened(events, height - len(lines) - 1))


def help_page() -> RenderableType:
    """Keys, and what marks and words mean."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for sign, meaning in _KEYS.items():
        table.add_row(sign, meaning)
    return table
