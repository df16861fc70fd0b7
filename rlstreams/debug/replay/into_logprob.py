"""Replay into the real log-prob role, everybody else absent; each score is compared.

Each `ScoredTrajectory` says which others were scored with it. The same windows are prescribed, so
the same forwards run, and with the same weights and threads every log-prob has the same bits.
Decision 0015.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rlstreams.debug.replay.diff import Pair, Summary, field_lines, pair_lines
from rlstreams.debug.replay.fields import differing
from rlstreams.debug.replay.player import commit, outgoing_of
from rlstreams.debug.replay.target import Target
from rlstreams.debug.replay.weights import RecordedWeights
from rlstreams.schemas import DecodeError, encode
from rlstreams.schemas.events import Event, ScoredTrajectory
from rlstreams.streams.log.bus import Closing
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.errors import DeadlineError, StreamsError
from rlstreams.streams.log.fencing import FirstRecords
from rlstreams.streams.log.record import WINDOW_HEADER, Outgoing, Position, Record
from rlstreams.streams.log.text import counted
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED, TRAJECTORIES
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.streams.recording.selection import Selection, facts_of
from rlstreams.up.supervisor.child import ChildSpec, log_tail, make_spawner

AHEAD = 4  # windows that were sent and are not scored yet
START_S = 120.0  # imports and loading a model
DEADLINE_S = 120.0  # without any output
_BATCH = 1000


class RoleEndedError(StreamsError):
    """The role's process ended before it had done its work; holds its last lines."""


@dataclass(slots=True, kw_only=True)
class ScoreReplay:
    """What the role made of its recorded inputs."""

    scores: Summary = field(default_factory=lambda: Summary(event="ScoredTrajectory"))
    num_failed: int = 0  # scored then, a dead letter now
    skipped: Counter[str] = field(default_factory=Counter)  # why it was not fed, and how many

    @property
    def is_equal(self) -> bool:
        """Whether everything that was fed came out alike, and something was fed."""
        return self.scores.num_equal > 0 and self.scores.is_equal and not self.num_failed

    def lines(self) -> list[str]:
        """For the terminal."""
        scores, things = self.scores, ("scored trajectory", "scored trajectories")
        return [
            f"{counted(scores.num_equal, *things)} equal, bit for bit; "
            f"{scores.num_different:,} different, {self.num_failed:,} not scored",
            *field_lines(scores),
            *(pair_lines(scores.first) if scores.first else ()),
            *(f"{count:,} not fed: {why}" for why, count in self.skipped.most_common()),
        ]


class _Role(Closing):
    """The role's process, and what it was fed and has not scored yet."""

    def __init__(self, target: Target, made: ScoreReplay) -> None:
        self._made = made
        # As recorded, by group and sample.
        self.open: dict[tuple[str | None, int | None], Record[ScoredTrajectory]] = {}
        topics = (SCORED, DEAD_LETTERS)
        starts = {p: at for topic in topics for p, at in target.bus.beginnings(topic.name).items()}
        self._schemas = target.bus.schemas()
        self._log = target.folder / "logs" / "logprob-0.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        spec = ChildSpec(
            role="logprob",
            ordinal=0,
            config=target.config_file,
            log=self._log,
            instance=uuid.uuid4().hex,
        )
        self._reader = target.bus.reader(starts)
        self._child = make_spawner(has_gpus=target.config.has_gpus).spawn(spec)
        self._started_s = time.monotonic()

    def wait(self, most: int) -> None:
        """Compare what comes, until at most so many are not scored.

        Raises:
            RoleEndedError: the role ended first.
            DeadlineError: nothing new for the deadline; the role's start counts extra.
        """
        last_s = max(time.monotonic(), self._started_s + START_S - DEADLINE_S)
        while len(self.open) > most:
            has_ended = self._child.poll() is not None
            if self._look():
                last_s = time.monotonic()
            elif has_ended:
                tail = "\n".join(log_tail(self._log))
                raise RoleEndedError(
                    f"logprob ended with status {self._child.poll()} before "
                    f"{len(self.open)} scores; last lines of {self._log}:\n{tail}"
                )
            elif time.monotonic() - last_s > DEADLINE_S:
                raise DeadlineError(
                    f"logprob wrote nothing for {DEADLINE_S:g} s; waiting for "
                    f"{len(self.open)} scores; see {self._log}"
                )

    def _look(self) -> bool:
        raws = self._reader.poll(_BATCH, 0.05)
        for raw in raws:
            with suppress(DecodeError):  # a foreign writer's: what it is about stays open
                self._take(decoded(raw, self._schemas))
        return bool(raws)

    def _take(self, record: Record[Event]) -> None:
        event = record.event
        facts = facts_of(event)
        recorded = self.open.pop((facts.group_id, facts.sample), None)
        if recorded is None:
            return
        if not isinstance(event, ScoredTrajectory):
            self._made.num_failed += 1
            return
        pair = Pair(
            event="ScoredTrajectory",
            about=f"sample {facts.name}",
            one=recorded.position,
            other=record.position,
            differences=tuple(differing(recorded.event, event)),
        )
        self._made.scores.add(pair)

    def close(self) -> None:
        """Let it drain, or end it."""
        self._reader.close()
        if self._child.poll() is None:
            self._child.signal(signal.SIGTERM)
            if not self._child.wait(10.0):
                self._child.signal(signal.SIGKILL)
                self._child.wait(5.0)


def replay_into_logprob(
    recording: Recording, target: Target, weights: RecordedWeights, selection: Selection
) -> ScoreReplay:
    """Feed the role and compare.

    Args:
        selection: windows of which a sample is meant.

    Raises:
        NotRecordedError: there are no weights to feed it with.
        RoleEndedError, DeadlineError: the role did not do its work.
    """
    made, served = ScoreReplay(), weights.available
    if not served:
        raise NotRecordedError(
            f"no weights of versions {sorted(weights.known)} are available: record with --weights, "
            "or make them with `replay --into trainer --keep-weights` and name them with --weights"
        )
    with target.bus.producer("replay") as producer, _Role(target, made) as role:
        commit(producer, [weights.announcement(version, served) for version in sorted(served)])
        for window in _replayable(recording, selection, served, made):
            commit(producer, _prescribed(recording, window))
            for scored in window:
                sample = scored.event.trajectory
                role.open[sample.group_id, sample.sample] = scored
            role.wait(AHEAD * len(window))
        role.wait(0)
    return made


def _replayable(
    recording: Recording, selection: Selection, available: Set[int], made: ScoreReplay
) -> Iterator[list[Record[ScoredTrajectory]]]:
    for window in _windows(recording, made):
        if not any(selection.wants(scored.raw, scored.event) for scored in window):
            continue
        scores = [score for scored in window for score in scored.event.scores]
        if {score.anchor for score in scores} - {"sampled"}:
            made.skipped["in windows scored under another version than sampled"] += len(window)
        elif {score.policy_version for score in scores} - available:
            made.skipped["in windows of versions whose weights are not at hand"] += len(window)
        else:
            yield window


def _windows(recording: Recording, made: ScoreReplay) -> Iterator[list[Record[ScoredTrajectory]]]:
    """Whole windows in the order in which they were finished; holds only those that are not."""
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


def _prescribed(recording: Recording, window: Sequence[Record[ScoredTrajectory]]) -> list[Outgoing]:
    """The window's trajectories, each with the header that says where in it it belongs."""
    name = f"{window[0].event.instance}-{window[0].event.window}"
    found = []
    for place, scored in enumerate(window):
        header = f"{name}/{place}/{len(window)}".encode()
        out = _trajectory(recording, scored.event)
        found.append(replace(out, headers={**out.headers, WINDOW_HEADER: header}))
    return found


def _trajectory(recording: Recording, scored: ScoredTrajectory) -> Outgoing:
    """As it was recorded, or out of the score, which holds all of it."""
    position = Position(TRAJECTORIES.name, scored.trajectory_partition, scored.trajectory_offset)
    if (raw := recording.find(position)) is not None:
        return outgoing_of(raw, recording.manifest.run)
    made = outgoing(TRAJECTORIES, scored.trajectory, partition=scored.trajectory_partition)
    return replace(made, value=encode(scored.trajectory))
