"""Figures of a run as JSON lines, as it makes them: what `up --json` prints for other programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

from rlstreams.show.metrics.rows import JsonLines, evaluation_row, step_row
from rlstreams.streams.log.text import plain_json
from rlstreams.streams.views.feed import ViewState
from rlstreams.streams.views.pace import pace

END = "end"  # kind of the last line


class Figures:
    """A line for each step and each evaluation, and one that says how the run ended."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._rows = JsonLines(file)
        self._step = 0
        self._evaluated: set[int] = set()  # versions

    def skip_to(self, views: ViewState) -> None:
        """Leave out the steps and evaluations that `views` has."""
        self._step = views.run.step
        self._evaluated = {point.policy_version for point in views.evaluation.curve}

    def update(
        self, views: ViewState, is_caught_up: Callable[[], bool], *, is_last: bool = False
    ) -> None:
        """Write what is new.

        Args:
            is_caught_up: whether all was read that the topics held when an evaluation seemed to be
                over: only then is it known how many answers it has.
            is_last: evaluations that lack answers, and that a later one followed, are written too.
        """
        steps = views.run.steps if views.run.step > self._step else ()
        for number, point in enumerate(steps, 1):
            if point.step <= self._step:
                continue
            found = pace(steps[:number])
            assert found is not None, "there is a step"
            row = step_row(point)
            more = {"step_target": views.run.step_target, "tokens_per_s": found.sampled_per_s}
            self._rows.write([replace(row, values={**row.values, **more})])
            self._step = point.step
        over = [p for p in views.evaluation.curve if is_last or p.is_complete]
        new = [p for p in over if p.policy_version not in self._evaluated]
        if new and is_caught_up():
            self._rows.write([evaluation_row(p, views.run.step_of(p.policy_version)) for p in new])
            self._evaluated |= {point.policy_version for point in new}

    def end(self, outcome: str, problem: str = "", error: str = "") -> None:
        """Write the last line.

        Args:
            problem: why the run failed, for people; empty: it did not.
            error: class name of the exception that reports `problem`; empty: none does.
        """
        said = {"kind": END, "outcome": outcome, "problem": problem, "error": error}
        self._file.write(f"{plain_json(said)}\n")
        self._file.flush()
