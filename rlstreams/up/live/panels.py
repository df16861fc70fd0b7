"""The panes of the live view: each takes the input and gives what rich draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from textwrap import wrap

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlstreams.schemas.events import NO_VERSION
from rlstreams.show.metrics.figures import NONE, of_run, of_step, step_s
from rlstreams.streams.log.roles import ROLES
from rlstreams.streams.views.dead import list_command
from rlstreams.streams.views.evaluation import EvaluationPoint
from rlstreams.streams.views.learning import hindrance
from rlstreams.streams.views.pace import bottleneck, shortage
from rlstreams.streams.views.run import StepPoint
from rlstreams.streams.views.workers import WorkerView
from rlstreams.words.screen import (
    ENDING,
    LiveInput,
    ProcessInfo,
    clock,
    doing,
    number,
    visible,
    waits,
)

KILL = "\u250a"  # a dotted stroke
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # an eighth of a row to all of it
Points = Sequence[tuple[float, float]]


def chart(
    curves: Sequence[tuple[Points, str, str]],
    *,
    width: int,
    height: int,
    x_max: float,
    y_min: float,
    y_max: float,
    marks: Sequence[float] = (),
) -> list[Text]:
    """`height` rows of `width` cells; x from 0 to `x_max`, y from `y_min` to `y_max`.

    Args:
        curves: points, their style and character, "" for blocks as high as the point in its row;
            a later one is drawn over earlier ones.
        marks: x of vertical strokes, drawn under everything.
    """

    def column(x: float) -> int:
        return round(min(1.0, x / x_max) * (width - 1))

    cells = {(row, column(x)): (KILL, "red") for x in marks for row in range(height)}
    for points, style, char in curves:
        for (x, y), following in zip_longest(points, points[1:]):
            if math.isfinite(y):
                eighths = min(8 * height - 1, int((y - y_min) / (y_max - y_min) * 8 * height))
                row, block = height - 1 - eighths // 8, BLOCKS[eighths % 8]
                end = column(following[0]) if following and not char else 0  # up to the next point
                for at in range(column(x), max(end, column(x) + 1)):
                    cells[row, at] = (char or block, style)
    return [
        Text.assemble(*(cells.get((row, at), (" ", "")) for at in range(width)), no_wrap=True)
        for row in range(height)
    ]


REWARD_STYLE = "bright_black"
ACCURACY_STYLE = "bold cyan"
MARKER = "o"  # of the held-out accuracy
_NAME, _BESIDE_STATE = 14, 36  # columns that a process's name takes; with version and rate
_NEWS_ROWS = 4  # of a message: a cause, its figures and what to set
_MARGIN = 7  # columns of the y axis
_STATE_STYLES = {  # any other: yellow
    **dict.fromkeys(("working", "training"), "green"),
    **dict.fromkeys(("waiting", "ended"), "bright_black"),
    **dict.fromkeys(("silent", "down"), "bold red"),
}


def header(given: LiveInput) -> RenderableType:
    """A line with the run's name, state, step, accuracy and time left; and a progress bar."""
    run, target = given.views.run, given.target
    line = Table.grid(expand=True, padding=(0, 1, 0, 0))
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_column(no_wrap=True, justify="right")
    left = Text.assemble((" rlstreams ", "bold reverse"), f" {given.run}  ")
    left.append(given.state, "bold" if given.state == "running" else "bold yellow")
    figures = of_run(given.views, target=given.target)
    right = Text.assemble("step ", (figures["steps"].value, "bold"), "  ")
    if (held_out := figures["held_out"].value) != NONE:
        right.append(f"held-out {held_out}  ")
    right.append(f"{clock(given.elapsed_s)}{_left(given)}")
    line.add_row(left, right)
    bar = ProgressBar(total=target or 1, completed=run.step, complete_style="cyan")
    return Group(line, bar)


def _left(given: LiveInput) -> str:
    run = given.views.run
    seconds = step_s(run.steps) * (given.target - run.step)
    return f", {clock(seconds)} left" if given.state == "running" and seconds > 0 else ""


def learning(given: LiveInput, width: int, height: int) -> RenderableType:
    """Reward and held-out accuracy by step, kills as strokes; and a legend."""
    steps, curve = given.views.run.steps, given.views.evaluation.curve
    rewards = [(p.step, p.reward) for p in steps]
    accuracies = given.views.held_out
    y_min, y_max = _span([y for _, y in (*rewards, *accuracies)])
    figures = _learns(given, width)
    height = max(1, height - 1 - len(figures))
    rows = chart(
        [(rewards, REWARD_STYLE, ""), (accuracies, ACCURACY_STYLE, MARKER)],
        width=max(8, width - _MARGIN),
        height=height,
        x_max=float(max(given.target, given.views.run.step, 1)),
        y_min=y_min,
        y_max=y_max,
        marks=[mark.step for mark in given.kills],
    )
    values = {0: y_max, height // 2: (y_min + y_max) / 2, height - 1: y_min}
    labels = (number(values[index]) if index in values else "" for index in range(height))
    labelled = [
        Text(f"{label:<{_MARGIN}}"[:_MARGIN], "bright_black") + row
        for label, row in zip(labels, rows, strict=True)
    ]
    axis = f"step {max(given.target, given.views.run.step, 1)}"
    legend = _legend(steps, curve, bool(given.kills))
    room = width - legend.cell_len
    if room >= len(axis) + 2:
        legend.append(f"{axis:>{room}}", "bright_black")
    return Group(*labelled, legend, *figures)


def _learns(given: LiveInput, width: int) -> list[Text]:
    """Loss, KL, entropy, gradient norm of the newest step and the rate of the last ones."""
    steps = given.views.run.steps
    rate = of_run(given.views)["rate"]
    if rate.value == NONE:
        return []
    text = Text(no_wrap=True, overflow="ellipsis")
    shown = [(f.name, f.value) for key, f in of_step(steps[-1]).items() if key != "staleness"]
    for name, value in (*shown, (rate.unit, rate.value)):
        if text.cell_len + len(name) + len(value) + 3 <= width:
            text.append(f"{name} ", "bright_black").append(f"{value}  ")
    return [text]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """0 to 1, or as far as the rewards of a function of a user's go."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _legend(steps: Sequence[StepPoint], curve: Sequence[EvaluationPoint], has_kills: bool) -> Text:
    accuracy = f"{curve[-1].accuracy:.2f}" if curve else "-"
    reward = f"{steps[-1].reward:.2f}" if steps else "-"
    text = Text(no_wrap=True)
    text.append(f"{MARKER} held-out ", ACCURACY_STYLE).append(accuracy)
    text.append(f" {BLOCKS[3]} reward ", REWARD_STYLE).append(reward)
    return text.append(f" {KILL} kill", "red") if has_kills else text


def workers(given: LiveInput, *, has_rates: bool = True) -> RenderableType:
    """Process with its restarts, what it does or waits for, the version that it holds, its rate;
    without the last two where they have no room."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, overflow="ellipsis", min_width=9)  # "rollout-0"
    table.add_column(overflow="fold", min_width=7, ratio=1)  # all of "waiting for trajectories"
    titles = ("worker", "state", "", "rate")[: 4 if has_rates else 2]
    for _ in titles[2:]:
        table.add_column(no_wrap=True, overflow="ellipsis", justify="right")
    table.add_row(*(Text(title, "bright_black") for title in titles))
    reported = given.workers
    processes = {process.worker: process for process in given.processes}
    names = sorted(reported.keys() | processes.keys(), key=_by_role)
    for name in names:
        row = _worker_row(name, reported.get(name), processes.get(name), given)
        table.add_row(*islice(row, len(titles)))
    return table


def num_folded(given: LiveInput, width: int, *, has_rates: bool) -> int:
    """Rows that `workers` takes of this width besides one for each process."""
    room = max(7, width - (_BESIDE_STATE if has_rates else _NAME))
    states = [doing(w.state, w.detail) for w in given.workers.values()]
    return sum(len(state) // room for state in states)


def _by_role(worker: str) -> tuple[int, str]:
    role = worker.rpartition("-")[0]
    return (ROLES.index(role) if role in ROLES else len(ROLES), worker)


def _worker_row(
    name: str, worker: WorkerView | None, process: ProcessInfo | None, given: LiveInput
) -> Iterator[Text]:
    state = worker.state if worker else "starting"
    if process is not None and not process.is_alive:
        # Towards its end a run has workers that are done: red is for those that are missed.
        state = "ended" if given.state in ENDING else "down"
    version = worker.policy_version if worker else NO_VERSION
    restarts = process.restarts if process else worker.restarts if worker else 0
    yield Text.assemble(name, (f" +{restarts}" if restarts else "", "bold red"))
    detail = worker.detail if worker and state == worker.state else ""
    yield Text(doing(state, detail), _STATE_STYLES.get(state, "yellow"))
    yield Text("" if version == NO_VERSION else f"v{version}")
    yield Text(_rate(worker, given) if state not in ("down", "ended", "silent") else "-")


def _rate(worker: WorkerView | None, given: LiveInput) -> str:
    if worker is None:
        return "-"
    if worker.role == "trainer":
        return f"{step_s(given.views.run.steps):.2f} s/step"
    for counter, unit in (("tokens", "tokens/s"), ("samples", "samples/s"), ("groups", "groups/s")):
        if counter in worker.rates:
            return f"{worker.rates[counter]:,.0f} {unit}"
    return "-"


def queues(given: LiveInput, height: int) -> RenderableType:
    """Lag of the readers in samples, by topic; below, staleness of the last step."""
    lag = [(topic, f"{samples:,}") for topic, samples in given.views.flow.waiting.items()]
    bars = staleness_lines(given.views.run.steps)[: max(0, height - 1 - len(lag))]
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column(no_wrap=True, overflow="ellipsis", justify="right")
    table.add_row("topic", "lag", style="bright_black")
    for row in lag:
        table.add_row(*row)
    return Group(table, *bars)


def staleness_lines(steps: Sequence[StepPoint]) -> list[Text]:
    """Share of the last step's tokens by staleness; the farthest ones share the last bar."""
    counts: Counter[str] = Counter()
    for distance, tokens in sorted(steps[-1].staleness.items() if steps else ()):
        counts[str(distance) if distance < 2 else "2+"] += tokens
    lines = [Text("staleness, last step", style="bright_black")]
    for name, tokens in counts.items():
        share = tokens / counts.total()
        bar = "\u2588" * max(1, round(share * 10))
        lines.append(Text.assemble(f"{name:>3} ", (f"{bar:<10}", "cyan"), f" {share:4.0%}"))
    return lines if counts else []


def footer(given: LiveInput, width: int) -> RenderableType:
    """The newest message, and what keeps the run from learning, in up to `_NEWS_ROWS` rows; the
    pace of the last steps; and the key that drains the run.

    Dead letters, if there are any, stand above.
    """
    held = visible(bottleneck(given.views.run.steps) or waits(given))
    lines = [(row, "bold red") for row in _news(given, width)]
    lines += [(held, "bright_black")] if held else []
    shown = [Text(f" {text}", style, no_wrap=True, overflow="ellipsis")
             for text, style in lines or [("", "")]]  # fmt: skip
    hint = Text.assemble(
        (" Ctrl-C ", "reverse"), " drain; resume later with --resume", no_wrap=True,
        overflow="ellipsis",
    )  # fmt: skip
    dead = given.views.dead
    letters = [Text(f" dead letters: {dead}   {list_command()}", "bold red", no_wrap=True)]
    return Group(*(letters if dead.num else ()), *shown, hint)


def _news(given: LiveInput, width: int) -> list[str]:
    found = shortage(given.views.run.steps) or str(hindrance(given.views) or "")
    # A message stays until the next one: it may not hide what keeps the run from learning.
    rooms = (1 if found else _NEWS_ROWS, _NEWS_ROWS - bool(given.message))
    return [
        row
        for text, room in zip((given.message, found), rooms, strict=True)
        for row in wrap(visible(text), max(20, width - 2), max_lines=room, placeholder=" \u2026")
    ]


def footer_rows(given: LiveInput, width: int) -> int:
    """Rows that `footer` takes of this width."""
    held = bottleneck(given.views.run.steps) or waits(given)
    return 1 + (given.views.dead.num > 0) + max(1, len(_news(given, width)) + bool(held))
