"""The first step behind which a metric left its band for good; writes nothing.

Measured steps come from the log. Between two evaluations of held-out rows the versions in between
are read from the weight store, or made again (`rebuilt`), and evaluated, half way each time.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlstreams.debug.blame.band import Band, Departure, Point, departure
from rlstreams.debug.blame.series import (
    DEFAULT,
    HELD_OUT,
    SAMPLED,
    error_of,
    is_reward,
    named,
    series,
)
from rlstreams.debug.rerun.rebuilt import rebuilt
from rlstreams.debug.rerun.rerun import SavedState
from rlstreams.schemas.events import PolicyStored
from rlstreams.streams.log.text import counted
from rlstreams.streams.run.run_log import RunLog
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.trainer.claim import read_ledger
from rlstreams.workers.weights.store.at_hand import AtHand

SHOWN = 6  # points on either side of the border
LOOK_BACK = 2  # steps before it: momentum still grows with a bad gradient when it is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisected:
    """A metric's points, its departure from the band, and the steps to blame."""

    metric: str
    points: tuple[Point, ...]  # all known points, in the order of steps
    again: tuple[int, ...]  # steps whose point was measured now
    departure: Departure | None
    is_sampled: bool  # the metric is of a version, whose step made it; else a step's own figure

    @property
    def blamed(self) -> tuple[int, int] | None:
        """First and last step whose updates led to the first point outside; None: no departure."""
        if self.departure is None:
            return None
        last, before = self.departure.point.step, self.departure.before
        first = before.step + 1 if before and self.is_sampled else last
        return max(first - LOOK_BACK, 1), last

    def lines(self, name: str) -> list[str]:
        """Return lines for the terminal.

        Args:
            name: the run's name in commands.
        """
        found, blamed = self.departure, self.blamed
        if found is None or blamed is None:
            there = f"steps {self.points[0].step} to {self.points[-1].step}" if self.points else "-"
            return [
                f"{self.metric}: no step: nowhere did it leave its band for good "
                f"({counted(len(self.points), 'point')}, {there})"
            ]
        what = "version made by step" if self.is_sampled else "step"
        number = next(n for n, p in enumerate(self.points) if p.step == found.point.step)
        near = self.points[max(0, number - SHOWN) : number + SHOWN]
        rows = [
            f"{p.step:>8} {p.value:>12.6g}  "
            f"{'' if p.value in found.band else 'outside'}"
            f"{'  measured now' if p.step in self.again else ''}".rstrip()
            for p in near
        ]
        option = "" if self.is_sampled else f" --at {found.point.step}"
        first, last = blamed
        return [
            f"{self.metric}: left its band of {found.band} at {what} {found.point.step}; of "
            f"{counted(found.num_points, 'point')} from there on {found.num_outside} lie outside",
            f"{'step':>8} {self.metric:>12}",
            *rows,
            "which samples: "
            f"rlstreams replay blame {shlex.quote(name)} --steps {first}:{last} "
            f"--metric {self.metric}{option}",
        ]


def bisect(
    log: RunLog,
    config: RunConfig,
    metric: str,
    *,
    band: Band | None = None,
    checkpoints: Sequence[Path],
    say: Callable[[str], None] = lambda _: None,
) -> Bisected:
    """Find the departure, with the versions on both sides of the border evaluated.

    Args:
        config: names the present places of model folder and verifier.
        metric: "": the held-out reward if the run has one, else `DEFAULT`.
        band: the usual values; None: the band is learnt.
        checkpoints: folders of checkpoints to choose from.

    Raises:
        ConfigError: the log has no such metric.
        RerunError, RetentionError, OffsetGoneError: steps between two evaluations cannot be done
            again.
    """
    known = series(log)
    name = named(metric or (HELD_OUT if HELD_OUT in known else DEFAULT), known)
    points = list(known[name])
    found = departure(points, band, higher_is_better=is_reward(name))
    again: list[Point] = []
    if found is not None and name in SAMPLED and (before := found.before) is not None:
        if found.point.step - before.step > 1:
            again = _between(log, config, name, before, found, checkpoints, say)
        outside = [p for p in again if p.value not in found.band]
        inside = [p for p in again if p.value in found.band]
        found = replace(
            found,
            point=min([*outside, found.point], key=lambda p: p.step),
            before=max([*inside, before], key=lambda p: p.step),
            num_outside=found.num_outside + len(outside),
            num_points=found.num_points + len(outside),
        )
    return Bisected(
        metric=name,
        points=tuple(sorted([*points, *again], key=lambda p: p.step)),
        again=tuple(sorted(p.step for p in again)),
        departure=found,
        is_sampled=name in SAMPLED,
    )


def _between(
    log: RunLog,
    config: RunConfig,
    metric: str,
    before: Point,
    found: Departure,
    checkpoints: Sequence[Path],
    say: Callable[[str], None],
) -> list[Point]:
    """Evaluate versions between `before` and `found`, half way each time; return the points."""
    from rlstreams.debug.blame.evaluated import Evaluator, held_out_prompts

    low, high, measured = before.step, found.point.step, list[Point]()
    # The engine first: torch keeps the numeric settings of the last to begin, which redoes steps.
    with (
        closing(Evaluator(config, held_out_prompts(log))) as evaluator,
        _weights(log, config, low, high, checkpoints) as weights_behind,
    ):
        while high - low > 1:
            middle = (low + high) // 2
            say(f"step {middle}: {metric} of its version")
            version, weights = weights_behind(middle)
            got = evaluator.evaluate(weights, version)
            error = error_of(got.reward, got.num_answered) if metric == HELD_OUT else 0.0
            measured.append(Point(step=middle, value=got.value(metric), error=error))
            if math.isfinite(measured[-1].value) and measured[-1].value in found.band:
                low = middle
            else:
                high = middle
    return measured


Weights = tuple[int, Mapping[str, Any]]  # a version and its tensors


@contextmanager
def _weights(
    log: RunLog, config: RunConfig, low: int, high: int, checkpoints: Sequence[Path]
) -> Iterator[Callable[[int], Weights]]:
    """Yield a function from step to its version's weights, for steps between `low` and `high`.

    Weights come from folders and stores, if these hold all; else the steps are done again.
    """
    ledger = read_ledger(log.bus, "bisect")
    versions = {step: ledger.steps[step].policy_version for step in range(low + 1, high)
                if step in ledger.steps}  # fmt: skip
    stores = {one.event.address for one in log.read(PolicyStored, skip_unreadable=True)}
    hashes = {version: ledger.hashes[version] for version in versions.values()}
    at_hand = AtHand(config.run.id, hashes, [Path(config.folder) / "weights", *sorted(stores)])
    if len(versions) == high - low - 1 and at_hand.versions == hashes.keys():
        yield lambda step: (versions[step], at_hand.weights_at(versions[step]))
        return
    with rebuilt(log.bus, config, low + 1, high, checkpoints=checkpoints) as steps:
        steps.go_to(low)
        states = {low: SavedState(steps.training, low)}

        def again(step: int) -> Weights:
            begin = max(known for known in states if known <= step)
            states[begin].back()
            steps.go_to(step)
            now = SavedState(steps.training, step)
            for known in states.keys() - {begin}:
                del states[known]
            states[step] = now
            return steps.ledger.steps[step].policy_version, now.weights

        yield again
