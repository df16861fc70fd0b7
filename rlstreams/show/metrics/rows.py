"""Figures by step as rows: the fold that files and trackers get, its reader, two kinds of file.

The log alone decides what is in them, so a row is the same whether it was read while the run went
on, afterwards, or a second time.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol, TextIO

from rlstreams.schemas.events import (
    EVALUATE,
    TRAIN,
    Event,
    GroupsDropped,
    StepCompleted,
    Trajectory,
)
from rlstreams.streams.log.bus import Bus, existing
from rlstreams.streams.log.errors import BrokerError, DeadlineError
from rlstreams.streams.log.group_ids import evaluation_id, sample_name
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import CALLS, DEAD_LETTERS, PROMPTS, STEPS, TRAJECTORIES
from rlstreams.streams.samples.fold import Samples
from rlstreams.streams.segments import sampled_segments
from rlstreams.streams.views.agents import AgentsOfBatches
from rlstreams.streams.views.evaluation import EvaluationPoint, HeldOutAnswer, answer_of, evaluation
from rlstreams.streams.views.feed import Feed
from rlstreams.streams.views.run import StepPoint, step_point
from rlstreams.words.spelling import NUMBERS, Spelling

EVERY = 10  # versions, where no held-out rows are answered
COLUMNS = ("which", "sample", "reward", "version", "finish", "prompt", "answer", "look")


class SamplePicks:
    """Keeps samples of each evaluation, or, without, of each tenth version.

    Args:
        spelling: how tokens become text.
        place: the run's name in commands.
    """

    def __init__(self, spelling: Spelling, place: str, *, has_held_out: bool) -> None:
        self._spelling = spelling
        self._place = place
        self._has_held_out = has_held_out
        self._kept: dict[tuple[str, int], dict[str, tuple[str, HeldOutAnswer, int]]] = {}
        self._shown: set[tuple[str, int]] = set()

    def apply(self, event: Event) -> None:
        """Take one event; of a sample its first record alone."""
        if not isinstance(event, Trajectory):
            return
        version = self._version(event)
        if version is None or (event.purpose, version) in self._shown:
            return
        try:
            answer = answer_of(event, version)
        except ValueError:  # a foreign writer's record: it cannot be shown
            return
        found = (sample_name(event), answer, event.finished_at_ms)
        kept = self._kept.setdefault((event.purpose, version), {})
        _, best, _ = kept.setdefault("best", found)
        _, worst, _ = kept.setdefault("worst", found)
        _, _, newest_ms = kept.setdefault("newest", found)
        if answer.reward > best.reward:
            kept["best"] = found
        if answer.reward < worst.reward:
            kept["worst"] = found
        if event.finished_at_ms > newest_ms:
            kept["newest"] = found

    def _version(self, event: Trajectory) -> int | None:
        """Version under which a sample is kept; None: it is not kept."""
        if event.purpose == EVALUATE:
            identity = evaluation_id(event.group_id)
            return identity[0] if identity else None
        versions = [segment.policy_version for segment in sampled_segments(event)]
        is_kept = versions and not self._has_held_out and (max(versions) + 1) % EVERY == 0
        return max(versions) if is_kept else None

    def of(self, drawn: tuple[str, int]) -> Sequence[Mapping[str, str]]:
        """Rows with `COLUMNS` of the samples of a purpose and version, which are then forgotten."""
        self._shown.add(drawn)
        return [
            {
                "which": which,
                "sample": name,
                "reward": f"{answer.reward:.4g}",
                "version": str(answer.policy_version),
                "finish": answer.finish_reason,
                "prompt": self._text(answer.prompt_ids),
                "answer": self._text([token for run in answer.runs for token in run.token_ids]),
                "look": shlex.join(["rlstreams", "inspect", name, self._place]),
            }
            for which, (name, answer, _) in self._kept.pop(drawn, {}).items()
        ]

    def _text(self, token_ids: Sequence[int]) -> str:
        try:
            return self._spelling.decode(token_ids)
        except (OverflowError, TypeError):
            return NUMBERS.decode(token_ids)


TOPICS = (STEPS, PROMPTS, TRAJECTORIES, DEAD_LETTERS)
POLL_S = 0.5
LAST_S = 10.0  # the same once it is stopped: its caller waits


class Sink(Protocol):
    """A file or a tracker that takes rows."""

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Take rows; those of a step come once."""

    def close(self) -> None:
        """Finish what was begun."""


def read_rows(
    bus: Bus,
    sink: Sink,
    view: MetricRows,
    *,
    follow: bool,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Give the sink all rows of a fresh view, oldest first; with `follow` also those to come.

    Consumes: `steps`, `prompts`, `trajectories`, `dead-letters`, and `calls` of a run with agents,
    as a reader that commits nothing.
    Produces: nothing in the log. Waits for: records; with `follow` until the run has reached its
    target and is evaluated, `stopped()` is true, or its broker, once read to the end, is gone; what
    lies in the log when it is stopped is read. Unblocked by: the roles.

    Returns:
        How many rows there were.

    Raises:
        DeadlineError: nothing came of what lies in the log, at first or once it is stopped.
        BrokerError: the broker went before everything in it was read.
    """
    feed = Feed(bus, view, (*TOPICS, *existing(bus, (CALLS,) if view.has_agents else ())))
    num_rows = 0

    def give(*, is_caught_up: bool, is_last: bool = False) -> None:
        nonlocal num_rows
        rows = view.take(is_caught_up=is_caught_up, is_last=is_last)
        if rows:
            sink.write(rows)
        num_rows += len(rows)

    try:
        feed.catch_up()
        is_last = not follow
        give(is_caught_up=True, is_last=is_last)
        while not (is_last or view.is_over):
            if is_last := stopped():
                feed.catch_up(LAST_S)
                break
            try:
                while feed.poll(POLL_S):
                    give(is_caught_up=False)
                is_caught_up = not feed.behind(feed.ends())
            except (BrokerError, DeadlineError):
                break  # `up` has stopped its broker: the run is drained
            give(is_caught_up=is_caught_up)
        if is_last or view.is_over:
            give(is_caught_up=True, is_last=True)
    finally:
        feed.close()
    return num_rows


STEP, EVALUATION = "step", "evaluation"
_FIRST = ("kind", "step", "at")  # columns of a table


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """Figures of one step, or of one evaluation."""

    kind: str  # STEP, EVALUATION
    step: int  # of an evaluation: the step that made its version
    at_ms: int
    values: Mapping[str, float]
    samples: Sequence[Mapping[str, str]] = ()  # the best, the worst and the newest, where asked for

    @property
    def tags(self) -> Mapping[str, float]:
        """The values under the names that trackers show, each in the group of its kind."""
        return {n if "/" in n else f"{self.kind}/{n}": value for n, value in self.values.items()}

    @property
    def key(self) -> str:
        """Name of the row, unique in its run."""
        return row_key(self.step, self.tags)


def row_key(step: int, tags: Mapping[str, float]) -> str:
    """Name of a row, by its step and tags as a tracker returns them; empty: it is not ours."""
    if (version := tags.get("evaluation/policy_version")) is not None:
        return f"evaluation of version {int(version)}"
    return f"step {step}" if "step/policy_version" in tags else ""


class MetricRows:
    """A row for each step and each evaluation of `Samples`.

    Args:
        step_target: the run is not over before this step, though an earlier claim may end there.
        picks: gives rows their samples; None: they have none.
        has_agents: rows have figures of the agents whose sessions became their samples.
    """

    def __init__(
        self,
        *,
        has_held_out: bool = True,
        step_target: int = 0,
        picks: SamplePicks | None = None,
        has_agents: bool = False,
    ) -> None:
        self.has_agents = has_agents
        self._agents = AgentsOfBatches()
        self._has_held_out = has_held_out
        self._step_target = step_target
        self._picks = picks
        self._samples = Samples()
        self._ledger = self._samples.ledger
        self._ledger.listen(on_step=self._step, on_drop=self._drop)
        self._new: list[tuple[MetricsRow, StepCompleted]] = []
        self._given: set[int] = set()  # versions whose evaluation was given

    def apply(self, event: Event, position: Position | None = None) -> None:
        """Take one event."""
        if self.has_agents and self._agents.apply(event, position):
            return
        counts = self._samples.apply(event, position)
        if counts and self._picks is not None:
            self._picks.apply(event)

    def _step(self, event: StepCompleted, _: Position) -> None:
        self._new.append((step_row(step_point(event)), event))

    def _drop(self, event: GroupsDropped, _: Position) -> None:
        self._agents.take(group.group_id for group in event.groups)

    def take(self, *, is_caught_up: bool, is_last: bool = False) -> list[MetricsRow]:
        """Rows that are new, by time.

        Args:
            is_caught_up: all topics were read to their ends: only then is it known how many rows
                an evaluation has, and which sessions became the samples of a step.
            is_last: evaluations that lack answers, and that a later one followed, are rows too.
        """
        rows: list[MetricsRow] = []
        if is_caught_up or not self.has_agents:
            rows = [self._with_agents(row, *_batch(event)) for row, event in self._new]
            self._new = []
        if is_caught_up:
            for point in evaluation(self._samples).curve:
                is_over = is_last or point.is_complete
                if is_over and point.policy_version not in self._given:
                    self._given.add(point.policy_version)
                    step = self._ledger.made_by.get(point.policy_version, point.policy_version)
                    rows.append(self._with_agents(evaluation_row(point, step), self._asked(point)))
        if (picks := self._picks) is not None:
            rows = [replace(row, samples=picks.of(_drawn_under(row))) for row in rows]
        return sorted(rows, key=lambda row: row.at_ms)

    def _with_agents(
        self, row: MetricsRow, groups: Iterable[str], samples: Container[str] | None = None
    ) -> MetricsRow:
        """Add `agent/NAME/FIGURE` of the sessions that became the row's samples."""
        values = {
            f"agent/{one.agent or 'unknown'}/{name}": value
            for one in self._agents.take(groups, samples)
            for name, value in {"sessions": one.num_sessions, **one.values}.items()
            if value is not None
        }
        return replace(row, values={**row.values, **values}) if values else row

    def _asked(self, point: EvaluationPoint) -> list[str]:
        """Groups of an evaluation whose sessions are kept."""
        ids = {group: evaluation_id(group) for group in self._agents.groups}
        return [group for group, one in ids.items() if one and one[0] == point.policy_version]

    @property
    def is_over(self) -> bool:
        """The target is reached, and the evaluation of the last version, if any, was given."""
        is_given = not self._has_held_out or self._ledger.policy_version in self._given
        is_last = self._ledger.last_step >= self._step_target
        return is_given and is_last and self._ledger.at_target


def _batch(event: StepCompleted) -> tuple[set[str], set[str]]:
    """Groups and names of a step's samples."""
    names = {sample_name(ref) for ref in event.samples}
    return {ref.group_id for ref in event.samples}, names


def _drawn_under(row: MetricsRow) -> tuple[str, int]:
    """Purpose and version of the samples that a row shows; of a step: the version before."""
    version = int(row.values["policy_version"])
    return (EVALUATE, version) if row.kind == EVALUATION else (TRAIN, version - 1)


def step_row(point: StepPoint) -> MetricsRow:
    """Make the row of a step."""
    num_tokens = sum(point.staleness.values())
    distance = sum(d * tokens for d, tokens in point.staleness.items())
    values = {
        **point.metrics,
        "epoch": point.epoch,
        "loss": point.loss,
        "masked_segments": point.num_masked,
        "policy_version": point.policy_version,
        "reward": point.reward,
        "samples": point.num_samples,
        "seconds": (point.finished_at_ms - point.started_at_ms) / 1000,
        "staleness_max": max(point.staleness, default=0),
        "staleness_mean": distance / num_tokens if num_tokens else 0.0,
        "tokens": point.num_tokens,
    }
    return MetricsRow(kind=STEP, step=point.step, at_ms=point.finished_at_ms, values=values)


def evaluation_row(point: EvaluationPoint, step: int) -> MetricsRow:
    """Make the row of an evaluation; `step` made its version."""
    values: dict[str, float] = {
        "evaluation/best_reward": point.best,
        "evaluation/dead": point.num_dead,
        "evaluation/mean_reward": point.accuracy,
        "evaluation/samples": point.num_samples,
        "evaluation/tokens": point.num_tokens,
        "policy_version": point.policy_version,
    }
    return MetricsRow(kind=EVALUATION, step=step, at_ms=point.finished_at_ms, values=values)


class JsonLines:
    """A line for each row, complete as soon as it is there."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Write and flush."""
        for row in rows:
            self._file.write(json.dumps(_flat(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Do nothing: every row is written."""


class CsvTable:
    """One table; its columns are known when the last row is, so nothing is written before."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._rows: list[MetricsRow] = []

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Keep the rows."""
        self._rows += rows

    def close(self) -> None:
        """Write the table; a value that a row lacks is empty."""
        names = sorted({name for row in self._rows for name in row.values})
        writer = csv.DictWriter(self._file, [*_FIRST, *names], lineterminator="\n")
        writer.writeheader()
        writer.writerows(_flat(row) for row in self._rows)
        self._file.flush()


def _flat(row: MetricsRow) -> dict[str, Any]:
    at = datetime.fromtimestamp(row.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return {"kind": row.kind, "step": row.step, "at": at, **row.values}
