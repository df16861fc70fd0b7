"""The recorded trajectories into the real log-prob role, window by window; every score compared.

Each `ScoredTrajectory` says which others were scored with it. The same windows are prescribed, so
the same forwards run, and with the same weights and threads every log-prob has the same bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rlstreams.debug.replay.fields import Difference, differing
from rlstreams.debug.replay.player import outgoing_of
from rlstreams.debug.replay.solo import Feeder, Outputs, SoloRole
from rlstreams.debug.replay.target import Target
from rlstreams.debug.replay.weights import RecordedWeights
from rlstreams.schemas import encode
from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.fencing import FirstRecords
from rlstreams.streams.log.record import WINDOW_HEADER, Outgoing, Position, Record
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED, TRAJECTORIES
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.streams.recording.selection import Selection

AHEAD = 4  # windows that were sent and are not scored yet

Sample = tuple[str, int]


@dataclass(slots=True, kw_only=True)
class ScoreReplay:
    """What came of it."""

    num_equal: int = 0
    num_different: int = 0
    num_failed: int = 0  # scored then, a dead letter now
    skipped: Counter[str] = field(default_factory=Counter)  # why, and how many trajectories
    by_field: Counter[str] = field(default_factory=Counter)
    largest_gap: float = 0.0
    first: tuple[Sample, Difference] | None = None

    @property
    def is_equal(self) -> bool:
        """Whether everything that was fed was scored alike, and something was fed."""
        return self.num_equal > 0 and self.num_different == 0 and self.num_failed == 0


def replay_logprob(
    recording: Recording,
    target: Target,
    weights: RecordedWeights,
    *,
    selection: Selection,
    tolerance: float = 0.0,
    deadline_s: float = 120.0,
) -> ScoreReplay:
    """Feed the role and compare.

    Args:
        recording: of scored trajectories.
        target: a fresh run.
        weights: where each version is pulled from.
        selection: windows of which a sample is meant are replayed.
        tolerance: scores that are at most this far apart are equal, nats.
        deadline_s: longest time for one window.

    Raises:
        NotRecordedError: no weights of any version that sampled are available.
        RoleEndedError, DeadlineError: the role did not do its work.
    """
    made = ScoreReplay()
    if not weights.available:
        raise NotRecordedError(
            f"no weights of versions {sorted(weights.known)} are available: record with --weights, "
            "or make them with `replay --into trainer --keep-weights` and name them with --weights"
        )
    open_: dict[Sample, ScoredTrajectory] = {}
    topics = [SCORED.name, DEAD_LETTERS.name]
    with (
        Outputs(target.bus, topics) as outputs,
        Feeder(target.bus) as feeder,
        SoloRole(target, "logprob", deadline_s=deadline_s) as role,
    ):

        def look() -> bool:
            records = outputs.poll(0.02)
            for record in records:
                _compare(record, open_, made, tolerance)
            return bool(records)

        served = weights.available
        feeder.send([weights.announcement(version, served) for version in sorted(served)])
        for window in _replayable(recording, selection, weights, made):
            feeder.send(_prescribed(recording, window))
            open_.update({_sample(scored.event): scored.event for scored in window})
            limit = AHEAD * len(window)
            role.until(lambda n=limit: len(open_) <= n, look, f"{len(open_)} scores")  # type: ignore[misc]
        role.until(lambda: not open_, look, f"the last {len(open_)} scores")
    return made


def _sample(event: ScoredTrajectory) -> Sample:
    return event.trajectory.group_id, event.trajectory.sample


def _compare(
    record: Record[object],
    open_: dict[Sample, ScoredTrajectory],
    made: ScoreReplay,
    tolerance: float,
) -> None:
    event = record.event
    if not isinstance(event, ScoredTrajectory):
        group, number = getattr(event, "group_id", ""), getattr(event, "sample", -1)
        made.num_failed += open_.pop((group, number), None) is not None
        return
    recorded = open_.pop(_sample(event), None)
    if recorded is None:
        return
    found = differing(recorded, event, tolerance=tolerance)
    made.num_equal += not found
    made.num_different += bool(found)
    for difference in found:
        made.by_field[difference.field] += 1
        made.largest_gap = max(made.largest_gap, difference.gap)
        made.first = made.first or (_sample(event), difference)


def _replayable(
    recording: Recording, selection: Selection, weights: RecordedWeights, made: ScoreReplay
) -> Iterator[list[Record[ScoredTrajectory]]]:
    for window in _windows(recording, made):
        events = [scored.event for scored in window]
        if not any(selection.wants(scored.raw, scored.event) for scored in window):
            continue
        versions = {score.policy_version for event in events for score in event.scores}
        anchors = {score.anchor for event in events for score in event.scores}
        if anchors - {"sampled"}:
            made.skipped["in windows scored under another version than sampled"] += len(window)
        elif versions - weights.available:
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
        if event.window < 0:
            made.skipped["scored by a release that did not write windows down"] += 1
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
        return outgoing_of(raw, recording.manifest.run, is_part=True)
    made = outgoing(TRAJECTORIES, scored.trajectory, partition=scored.trajectory_partition)
    return replace(made, value=encode(scored.trajectory))
