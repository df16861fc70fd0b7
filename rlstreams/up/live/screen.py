"""The live view of a run in a terminal: one screen that is redrawn, or plain lines.

`LiveView` gets all that it shows as `LiveInput`: frozen view states, processes. It reads no clock.
The log file of `up` has every line, but not the drawn screen.
"""

from __future__ import annotations

import errno
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO, cast

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from rlstreams.show.metrics.figures import of_step
from rlstreams.streams.views.feed import ViewState
from rlstreams.streams.views.learning import hindrance
from rlstreams.streams.views.pace import STEPS, pace, pace_line, ranks_of, shortage
from rlstreams.streams.views.run import StepPoint
from rlstreams.up.live.panels import (
    footer,
    footer_rows,
    header,
    learning,
    num_folded,
    queues,
    workers,
)
from rlstreams.words.screen import LiveInput, clock, over, visible, waits

_GONE = (errno.EPIPE, errno.EIO)


@contextmanager
def output_to(log: Path) -> Iterator[Output]:
    """`sys.stdout` as an `Output` in the block."""
    before, output = sys.stdout, Output(sys.stdout, log)
    sys.stdout = cast(TextIO, output)
    try:
        yield output
    finally:
        sys.stdout = before


class Output:
    """A text stream that writes to its log file, and to its reader."""

    def __init__(self, reader: TextIO, log: Path) -> None:
        self.reader = reader
        self._log = log  # made with its first line: a start that is refused changes nothing

    def __getattr__(self, name: str) -> object:
        return getattr(self.reader, name)

    def write(self, text: str) -> int:
        """Write into the log file, and to the reader.

        Raises OSError: the reader is gone. A full disk loses the line for the stream on that disk.
        """
        self.note(text)
        try:
            self.reader.write(text)
            self.reader.flush()
        except OSError as err:
            if err.errno in _GONE:
                raise
        return len(text)

    def note(self, text: str) -> None:
        """Write into the log file alone."""
        with suppress(OSError):
            self._log.parent.mkdir(exist_ok=True)
            fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(fd, text.encode("utf-8", "backslashreplace"))
            finally:
                os.close(fd)


_FRAME = 2  # rows and columns that a panel's border takes
_HEADER = 2
_FEWEST_ROWS = 24
_FEWEST_COLUMNS = 64
QUIET_S = 30.0  # without a line; then one says what is waited for
_KEPT = 200  # lines of what happened
_BEFORE = " starting: the run's topics are read, then its roles begin"  # until the first screen


class Screen:
    """One screenful: header, learning, workers, footer; from 64 columns on also the topics."""

    def __init__(self, given: LiveInput) -> None:
        self._given = given

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Fill what the terminal has; at 80 x 24 nothing is cut."""
        width = options.max_width
        height = max(_FEWEST_ROWS, options.height or console.size.height)
        given, rows = self._given, footer_rows(self._given, width)
        body = height - _HEADER - rows
        ends = (header(given), _HEADER), (footer(given, width), rows)
        layout = _split(ends[0], (self._body(width, body), body), ends[1])
        yield from console.render(layout, options.update_height(height))

    def _body(self, width: int, height: int) -> RenderableType:
        given = self._given
        num_workers = max(len(given.processes), len(given.workers))
        is_wide = width >= _FEWEST_COLUMNS  # else side by side neither of two could be read
        inner = (width * 2 // 3 if is_wide else width) - _FRAME - 2
        rows = num_workers + num_folded(given, inner, has_rates=is_wide)
        bottom = min(height // 2 + 2, max(10, rows + 1 + _FRAME))
        curve = learning(given, width - _FRAME - 2, height - bottom - _FRAME)
        below: RenderableType = _framed("workers", workers(given, has_rates=is_wide))
        if is_wide:
            lag = _framed("topics", queues(given, bottom - _FRAME))
            below = _split((below, width * 2 // 3), (lag, 0), is_row=True)
        return _split((_framed("learning", curve), 0), (below, bottom))


def _split(*parts: tuple[RenderableType, int], is_row: bool = False) -> Layout:
    """Each part and its size, one below the other or side by side; 0 takes what is left."""
    layout = Layout()
    split = layout.split_row if is_row else layout.split_column
    split(*(Layout(part, size=size or None) for part, size in parts))
    return layout


def _framed(title: str, content: RenderableType) -> Panel:
    return Panel(
        content,
        title=title,
        title_align="left",
        box=box.ROUNDED,
        border_style="bright_black",
        padding=(0, 1),
    )


class PlainLines:
    """A line for each new step and each new message, for logs and pipes."""

    def __init__(self) -> None:
        self._step = 0
        self._message = ""
        self._warned: dict[str, int] = {}  # by kind of warning: the last step that had it
        self._quiet_since_s = 0.0  # of the run's own clock
        self._is_start_shown = False  # its line: the accuracy before training

    def skip_to(self, views: ViewState) -> None:
        """Leave out the steps that `views` has: an earlier start of the run printed them."""
        self._step = views.run.step
        self._is_start_shown = views.evaluation.first is not None

    def new(self, given: LiveInput) -> Iterator[str]:
        """Yield the news since the last call; after `QUIET_S` without any, what is waited for."""
        lines = [*self._news(given), *self._steps(given)]
        if lines:
            self._quiet_since_s = given.elapsed_s
        elif given.elapsed_s - self._quiet_since_s >= QUIET_S:
            quiet_s, self._quiet_since_s = given.elapsed_s - self._quiet_since_s, given.elapsed_s
            step = f"step {given.views.run.step}/{given.target or '?'}"
            wait = waits(given) or "all processes work"
            lines.append(f"[{clock(given.elapsed_s)}] {step}, {quiet_s:.0f} s without news: {wait}")
        yield from lines

    def _news(self, given: LiveInput) -> Iterator[str]:
        if given.message != self._message:
            self._message = given.message
            yield f"[{clock(given.elapsed_s)}] {given.message}"
        first = given.views.evaluation.first
        if first is not None and not self._is_start_shown:
            self._is_start_shown = True
            # Steps may have been quicker than its last answer.
            if first.policy_version == given.views.run.first_version:
                measure = given.views.evaluation.measure
                yield f"before training: held-out {measure} {first.accuracy:.3f}, {over(first)}"

    def _steps(self, given: LiveInput) -> Iterator[str]:
        for step in given.views.run.steps:
            if step.step > self._step:
                self._step = step.step
                yield _step_line(step, given)
                done = [p for p in given.views.run.steps if p.step <= step.step]
                if step.step % STEPS == 0:
                    yield pace_line(done, ranks_of(given.views.run.claims))
                yield from self._warnings(given, done)

    def _warnings(self, given: LiveInput, done: list[StepPoint]) -> Iterator[str]:
        """Yield warnings of a kind that none of the last `STEPS` steps had."""
        views = replace(given.views, run=replace(given.views.run, steps=tuple(done)))
        for text in filter(None, (shortage(done), str(hindrance(views) or ""))):
            kind, step = text.partition(":")[0], done[-1].step
            if self._warned.get(kind, -STEPS) + STEPS <= step:
                yield text
            self._warned[kind] = step


def _step_line(point: StepPoint, given: LiveInput) -> str:
    known = [p for p in given.views.evaluation.curve if p.policy_version <= point.policy_version]
    held_out = f"{known[-1].accuracy:.3f} (v{known[-1].policy_version})" if known else "-"
    done = [p for p in given.views.run.steps if p.step <= point.step]
    mean = pace(done)
    rate = mean.sampled_per_s if mean else 0.0
    found = dict(of_step(point))
    staleness = found.pop("staleness").value
    figures = "  ".join(f"{figure.name} {figure.value}" for figure in found.values())
    return (
        f"step {point.step:>4}/{given.target or '?'}  reward {point.reward:.3f}  "
        f"held-out {held_out}  {figures}  {rate:,.0f} tokens/s  staleness {staleness}  "
        f"{clock(given.elapsed_s)}"
    )


class LiveView:
    """Draws on a terminal, prints lines elsewhere. Use it in a `with` block."""

    def __init__(self, console: Console | None = None) -> None:
        self._output = sys.stdout if isinstance(sys.stdout, Output) else None
        self._console = console or Console(file=self._output.reader if self._output else None)
        self._live = (
            Live(
                Text(_BEFORE),
                console=self._console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            if self._console.is_terminal and not self._console.is_dumb_terminal
            else None
        )
        if self._live is None and console is None:
            self._console = Console(force_terminal=False)  # lines are in the log file too
        self._lines = PlainLines()
        self._given: LiveInput | None = None
        self._events: deque[str] = deque(maxlen=_KEPT)

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is None:
            return
        self._live.stop()
        # The screen is gone with what it showed: the curve and what happened stay to scroll back.
        if self._given is not None:
            width = min(self._console.width, 80)
            for part in (header(self._given), learning(self._given, width, 12)):
                self._console.print(part, width=width)
        for line in self._events:
            self._console.print(Text(line), soft_wrap=True)

    def skip_to(self, views: ViewState) -> None:
        """Print no lines of steps that `views` has; a screen shows the whole curve all the same."""
        self._lines.skip_to(views)

    def update(self, given: LiveInput) -> None:
        """Show this now."""
        lines = tuple(visible(line) for line in self._lines.new(given))
        if self._live is None:
            for line in lines:
                self._console.print(Text(line), soft_wrap=True)
            return
        if self._output is not None:
            self._output.note("".join(f"{line}\n" for line in lines))
        self._given = given
        self._events.extend(line for line in lines if not line.startswith(("step ", "last ")))
        self._live.update(Screen(given), refresh=True)
