"""The panes of the live view: each takes the input and gives what rich draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlstreams.schemas.events import NO_VERSION
from rlstreams.streams.views.dead import list_command
from rlstreams.streams.views.evaluation import Answer, EvaluationPoint
from rlstreams.streams.views.pace import bottleneck, shortage
from rlstreams.streams.views.run import StepPoint
from rlstreams.streams.views.workers import WorkerView
from rlstreams.up.live.curve import Line, chart
from rlstreams.up.live.words import LiveInput, ProcessInfo, clock, spelled, step_seconds, visible

# Distinct on dark and light backgrounds, and apart from the red and green of wrong and right.
VERSION_STYLES = ("cyan", "magenta", "yellow", "blue")
REWARD_STYLE = "bright_black"
ACCURACY_STYLE = "bold cyan"
_STATE_STYLES = {
    "working": "green",
    "training": "green",
    "waiting": "bright_black",
    "pulling": "yellow",
    "redo": "yellow",
    "saving": "yellow",
    "starting": "yellow",
    "draining": "yellow",
    "silent": "bold red",
    "down": "bold red",
    "ended": "bright_black",
}
_ENDING = ("saving", "finishing", "draining")  # states of the run in which a process may end
_ROLE_ORDER = ("prompts", "rollout", "logprob", "trainer")


def header(given: LiveInput) -> RenderableType:
    """Two lines: what, how far, how good; and a bar."""
    run, target = given.views.run, given.target
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_column(no_wrap=True, justify="right")
    left = Text.assemble((" rlstreams ", "bold reverse"), f" {given.run}  ")
    left.append(given.state, "bold" if given.state == "running" else "bold yellow")
    right = Text.assemble("step ", (f"{run.step}", "bold"), f"/{target or '?'}   ")
    right.append_text(_gain(given.views.evaluation.curve))
    right.append(f"{clock(given.elapsed_s)} ")
    line.add_row(left, right)
    bar = ProgressBar(total=target or 1, completed=run.step, complete_style="cyan")
    return Group(line, bar)


def _gain(curve: Sequence[EvaluationPoint]) -> Text:
    if not curve:
        return Text("")
    first, last = curve[0].accuracy, curve[-1].accuracy
    if len(curve) == 1:
        return Text.assemble("held-out ", (f"{first:.2f}", "bold"), "   ")
    return Text.assemble("held-out ", f"{first:.2f} -> ", (f"{last:.2f}", "bold"), "   ")


def learning(given: LiveInput, width: int, height: int) -> RenderableType:
    """Reward and held-out accuracy by step, kills as strokes; and a legend."""
    steps, curve = given.views.run.steps, given.views.evaluation.curve
    x_max = float(max(given.target, given.views.run.step, 1))
    plot_height = max(1, height - 1)
    rewards = [(p.step, p.reward) for p in steps]
    accuracies = given.views.held_out
    y_min, y_max = _span([y for _, y in (*rewards, *accuracies)])
    rows = chart(
        [
            Line(points=rewards, style=REWARD_STYLE),
            Line(points=accuracies, style=ACCURACY_STYLE),
        ],
        width=max(8, width - 4),
        height=plot_height,
        x_max=x_max,
        y_min=y_min,
        y_max=y_max,
        marks=[mark.step for mark in given.kills],
    )
    labels = {
        0: axis_label(y_max),
        plot_height // 2: axis_label((y_min + y_max) / 2),
        plot_height - 1: axis_label(y_min),
    }
    axis = f"step {x_max:.0f}"
    lines = [
        Text(labels.get(index, "    "), style="bright_black") + row
        for index, row in enumerate(rows)
    ]
    legend = _legend(steps, curve, bool(given.kills))
    room = width - legend.cell_len
    if room >= len(axis) + 2:
        legend.append(f"{axis:>{room}}", "bright_black")
    return Group(*lines, legend)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """0 to 1, or as far as the rewards of a function of a user's go."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def axis_label(value: float) -> str:
    """Of the y axis, four characters."""
    shown = f"{value:.1f}" if len(f"{value:.1f}") <= 4 else f"{value:.0f}"
    return f"{shown:<4}" if len(shown) <= 4 else f"{value:.0e}".replace("e+0", "e")[:4]


def _legend(steps: Sequence[StepPoint], curve: Sequence[EvaluationPoint], has_kills: bool) -> Text:
    accuracy = f"{curve[-1].accuracy:.2f}" if curve else "-"
    reward = f"{steps[-1].reward:.2f}" if steps else "-"
    text = Text("    ", no_wrap=True)
    text.append("held-out ", ACCURACY_STYLE).append(accuracy)
    text.append("  reward ", REWARD_STYLE).append(reward)
    return text.append("  kill", "red") if has_kills else text


def problem(given: LiveInput, height: int) -> RenderableType:
    """One held-out problem: the question, the answer then, the answer now."""
    best = given.views.samples.best
    if best is None:
        return Text("waiting for the first evaluation", style="bright_black")
    question = Text(visible(given.decode(best.then.prompt_ids).strip()), style="bold")
    question.truncate(400)
    parts: list[RenderableType] = [question]
    if height > 6:
        parts.append(Text(""))
    parts += [_answer("then", best.then, given)]
    if best.now.policy_version != best.then.policy_version:
        parts += [_answer("now", best.now, given)]
    if height > 7:
        parts.append(Text("colored by policy version", style="bright_black"))
    return Group(*parts)


def _answer(when: str, answer: Answer, given: LiveInput) -> Text:
    verdict = ("right", "bold green") if answer.is_right else ("wrong", "bold red")
    text = Text.assemble((f"{when}, version {answer.policy_version}: ", "bright_black"), verdict)
    text.append("\n  ")
    for version, words in spelled(answer, given.decode):
        style = VERSION_STYLES[version % len(VERSION_STYLES)] if version >= 0 else "bright_black"
        text.append(visible(words), style)
    return text


def workers(given: LiveInput) -> RenderableType:
    """Process, what it does, the version that it holds, its rate, its restarts."""
    table = Table.grid(padding=(0, 1), expand=True)
    for least in (9, 7):  # "rollout-0", "working"
        table.add_column(no_wrap=True, overflow="ellipsis", min_width=least)
    for _ in range(3):
        table.add_column(no_wrap=True, overflow="ellipsis", justify="right")
    titles = ("worker", "state", "version", "rate", "restarts")
    table.add_row(*(Text(title, "bright_black") for title in titles))
    reported = {worker.worker: worker for worker in given.views.throughput.workers}
    processes = {process.worker: process for process in given.processes}
    names = sorted(reported.keys() | processes.keys(), key=_by_role)
    for name in names:
        table.add_row(*_worker_row(name, reported.get(name), processes.get(name), given))
    return table


def _by_role(worker: str) -> tuple[int, str]:
    role = worker.rpartition("-")[0]
    return (_ROLE_ORDER.index(role) if role in _ROLE_ORDER else len(_ROLE_ORDER), worker)


def _worker_row(
    name: str, worker: WorkerView | None, process: ProcessInfo | None, given: LiveInput
) -> Iterator[Text]:
    state = worker.state if worker else "starting"
    if process is not None and not process.is_alive:
        # Towards its end a run has workers that are done: red is for those that are missed.
        state = "ended" if given.state in _ENDING else "down"
    version = worker.policy_version if worker else NO_VERSION
    restarts = process.restarts if process else worker.restarts if worker else 0
    yield Text(name)
    yield Text(state, _STATE_STYLES.get(state, ""))
    yield Text("-" if version == NO_VERSION else str(version))
    yield Text(_rate(worker, given) if state not in ("down", "ended", "silent") else "-")
    yield Text(str(restarts), "bold red" if restarts else "bright_black")


def _rate(worker: WorkerView | None, given: LiveInput) -> str:
    if worker is None:
        return "-"
    if worker.role == "trainer":
        return f"{step_seconds(given.views.run.steps):.2f} s/step" if given.views.run.step else "-"
    for counter, unit in (("tokens", "tok/s"), ("samples", "samples/s"), ("groups", "groups/s")):
        if counter in worker.rates:
            return f"{worker.rates[counter]:,.0f} {unit}"
    return "-"


def queues(given: LiveInput, height: int) -> RenderableType:
    """How far readers are behind, by topic; below, staleness of the last step."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column(no_wrap=True, justify="right")
    table.add_row(*(Text(name, "bright_black") for name in ("topic", "unread")))
    histogram = staleness_lines(given.views.run.steps)
    unread = given.views.flow.waiting
    for topic in list(unread)[: max(1, height - 1 - len(histogram))]:
        table.add_row(Text(topic), Text(f"{unread[topic]:,}", "bold"))
    return Group(table, *histogram)


def staleness_lines(steps: Sequence[StepPoint], num_bars: int = 3, width: int = 10) -> list[Text]:
    """Share of the last step's tokens by staleness; the farthest ones share the last bar."""
    if not steps or not steps[-1].staleness:
        return []
    staleness = steps[-1].staleness
    total = sum(staleness.values())
    counts: dict[str, int] = {}
    for distance, tokens in sorted(staleness.items()):
        name = str(distance) if distance < num_bars - 1 else f"{num_bars - 1}+"
        counts[name] = counts.get(name, 0) + tokens
    lines = [Text("staleness, last step", style="bright_black")]
    for name, tokens in counts.items():
        share = tokens / total
        bar = "\u2588" * max(1, round(share * width))
        lines.append(Text.assemble(f"{name:>3} ", (f"{bar:<{width}}", "cyan"), f" {share:4.0%}"))
    return lines


def footer(given: LiveInput) -> RenderableType:
    """The newest thing that happened, or the pace of the last steps; and how to end it.

    Dead letters, if there are any, stand above.
    """
    run = given.views.run
    news = given.message or shortage(run.steps)
    line = news or bottleneck(run.steps)
    style = "bold red" if news else "bright_black"
    message = Text(f" {visible(line)}", style, no_wrap=True, overflow="ellipsis")
    hint = Text.assemble(
        (" Ctrl-C ", "reverse"),
        " drain; resume later with --resume",
        no_wrap=True,
        overflow="ellipsis",
    )
    dead = given.views.dead
    letters = [Text(f" dead letters: {dead}   {list_command()}", "bold red", no_wrap=True)]
    return Group(*(letters if dead.num else ()), message, hint)
