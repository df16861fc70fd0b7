"""Recorded windows of the log-prob role scored again, and each score compared.

Each `ScoredTrajectory` names its window and its versions. The role's own `score_window` gets the
same windows, so the same forwards run, and with the same weights and threads every log-prob has the
same bits. Decision 0015.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from rlstreams.debug.replay.diff import Pair, Summary, differing, field_lines, pair_lines
from rlstreams.debug.replay.player import Selection
from rlstreams.schemas.events import (
    NO_VERSION,
    PolicyPublished,
    PolicyStored,
    ScoredTrajectory,
)
from rlstreams.streams.log.fencing import FirstRecords
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.log.record import Record
from rlstreams.streams.log.text import counted
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.workers.bootstrap.parts import close_scorers, make_scorers
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.base import Scorer
from rlstreams.workers.logprob.scoring import Reference, score_window
from rlstreams.workers.logprob.versions import Anchor
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.policy.puller import Load
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.store.at_hand import AtHand

SHOWN = 10  # versions that a line names
Window = Sequence[Record[ScoredTrajectory]]


@dataclass(slots=True, kw_only=True)
class ScoreReplay:
    """Results of scoring the recorded windows again."""

    num_known: int = 0  # versions that the recording announces
    missing: Sequence[int] = ()  # versions whose weights are not there
    scores: Summary = field(default_factory=lambda: Summary(event="ScoredTrajectory"))
    failed: Counter[str] = field(default_factory=Counter)  # trajectories refused now, by reason
    skipped: Counter[str] = field(default_factory=Counter)  # trajectories passed by, by reason

    @property
    def is_equal(self) -> bool:
        """Whether every score is equal, and there is one."""
        return self.scores.num_equal > 0 and self.scores.is_equal and not self.failed

    def lines(self) -> list[str]:
        """Return lines for the terminal."""
        scores, things = self.scores, ("scored trajectory", "scored trajectories")
        missing = f"; missing: {_numbers(self.missing)}" if self.missing else ""
        num_available = self.num_known - len(self.missing)
        return [
            f"weights of {num_available} of {self.num_known} versions are available{missing}",
            f"{counted(scores.num_equal, *things)} equal, bit for bit; "
            f"{scores.num_different:,} different, {self.failed.total():,} not scored",
            *(f"{count:,} not scored: {why}" for why, count in self.failed.most_common(1)),
            *field_lines(scores),
            *(pair_lines(scores.first) if scores.first else ()),
            *(f"{count:,} passed by: {why}" for why, count in self.skipped.most_common()),
        ]


def scores_again(
    recording: Recording,
    config: RunConfig,
    folders: Sequence[Path],
    selection: Selection | None = None,
) -> ScoreReplay:
    """Score the windows with a selected sample, by default all; writes nothing.

    Args:
        config: the recorded run's; its own folders are searched for weights, too.
        folders: folders of weight versions, or stores; the recording's own is searched first.

    Raises:
        NotRecordedError: there are no weights, or no log-prob worker.
        ConfigError: the model cannot be loaded.
    """
    if config.logprob.place != "separate":
        raise NotRecordedError(
            f"logprob.place is {config.logprob.place!r}: the log-prob worker scored no policy"
        )
    made = ScoreReplay()
    places = [recording.folder / "weights", *folders, Path(config.folder) / "weights"]
    published = {
        record.event.policy_version: record.event for record in recording.events(PolicyPublished)
    }
    stores = {record.event.address for record in recording.events(PolicyStored)}
    hashes = {version: event.weight_hash for version, event in published.items()}
    at_hand = AtHand(config.run.id, hashes, [*places, *sorted(stores)])
    made.num_known = len(published)
    made.missing = sorted(published.keys() - at_hand.versions)
    if not at_hand.versions:
        raise NotRecordedError(
            f"no weights of versions {_numbers(made.missing)} are available: record with "
            "--weights, or make them with `replay --into trainer --keep-weights` and name "
            "them with --weights"
        )
    with _Scoring(config, published, at_hand) as again:
        for window in _windows(recording, made):
            if selection and not any(selection.wants(scored.event) for scored in window):
                continue
            if again.versions_of(window) <= at_hand.versions:
                again.score(window, made)
            else:
                why = "in windows of versions whose weights are not at hand"
                made.skipped[why] += len(window)
    return made


class _Scoring:
    """The scorers of the role, with the versions that a window needs. Use it in a `with` block."""

    def __init__(
        self, config: RunConfig, published: Mapping[int, PolicyPublished], at_hand: AtHand
    ) -> None:
        self._published, self._at_hand = published, at_hand
        self._limit = config.versions_held
        self._replay_routes = config.trainer.routing_replay
        self._scorer: Scorer
        self._reference: Reference | None
        self._scorer, self._reference = make_scorers(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        close_scorers(self._scorer, self._reference)

    def versions_of(self, window: Window) -> set[int]:
        """Return the versions that the window was scored under."""
        return {s.policy_version for one in window for s in one.event.scores} - {NO_VERSION}

    def score(self, window: Window, made: ScoreReplay) -> None:
        """Score a window again, and compare every score."""
        anchors = {
            one.event.trajectory.segments[score.segment].policy_version: Anchor(
                label=score.anchor, policy_version=score.policy_version
            )
            for one in window
            for score in one.event.scores
        }
        loads = {
            version: Load(weight_hash=event.weight_hash, load_id="")
            for version, event in self._published.items()
        }
        try:
            self._hold(self.versions_of(window))
            found = score_window(
                [one.event.trajectory for one in window], anchors, loads, self._scorer,
                self._reference, replay_routes=self._replay_routes,
            )  # fmt: skip
        except (EngineError, WeightError) as err:
            made.failed[str(err)] += len(window)
            return
        for one, scores in zip(window, found, strict=True):
            sample = one.event.trajectory
            made.scores.add(
                Pair(
                    event="ScoredTrajectory",
                    about=f"sample {sample_name(sample)}",
                    one=one.position,
                    other=one.position,
                    differences=tuple(differing(one.event, replace(one.event, scores=scores))),
                )
            )

    def _hold(self, versions: Collection[int]) -> None:
        for version in sorted(set(versions) - set(self._scorer.versions)):
            others = [held for held in self._scorer.versions if held not in versions]
            if others and len(self._scorer.versions) >= self._limit:
                self._scorer.drop(others[0])
            self._scorer.pull(self._published[version], self._at_hand)


def _windows(recording: Recording, made: ScoreReplay) -> Iterator[Window]:
    """Yield whole windows in the order of their last records; memory holds only unfinished ones."""
    open_: defaultdict[tuple[str, int], dict[int, Record[ScoredTrajectory]]] = defaultdict(dict)
    firsts = FirstRecords()
    for record in recording.events(ScoredTrajectory):
        event = record.event
        if not firsts.admits(event):
            made.skipped["second records of a sample"] += 1
            continue
        key = (event.instance, event.window)
        open_[key][event.window_place] = record
        if len(open_[key]) == event.window_size:
            yield [record for _, record in sorted(open_.pop(key).items())]
    for rest in open_.values():
        made.skipped["in windows of which a part is not recorded"] += len(rest)


def _numbers(versions: Sequence[int]) -> str:
    """Return the first `SHOWN` versions, and the number of the others."""
    more = f" and {len(versions) - SHOWN:,} more" if len(versions) > SHOWN else ""
    return ", ".join(map(str, versions[:SHOWN])) + more
