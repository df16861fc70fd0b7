"""The recorded prompts into the real rollout role, version by version; every trajectory compared.

Which version sampled a prompt hung on when the weights came, so each version is announced by itself
and the prompts that it sampled follow once the engine holds it. Samples that went on while their
weights changed are not fed: where that happened is not in the log to the token's instant.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from rlstreams.debug.replay.fields import Difference, differing
from rlstreams.debug.replay.player import outgoing_of
from rlstreams.debug.replay.solo import Feeder, Outputs, SoloRole
from rlstreams.debug.replay.target import Target
from rlstreams.debug.replay.weights import RecordedWeights
from rlstreams.schemas.events import PolicyLoaded, Trajectory
from rlstreams.streams.log.record import Outgoing, Position, Record
from rlstreams.streams.log.topics import DEAD_LETTERS, POLICY_PULLS, PROMPTS, TRAJECTORIES
from rlstreams.streams.recording import Entry, NotRecordedError, Recording
from rlstreams.streams.recording.selection import Selection

Sample = tuple[str, int]
_BATCH = 500  # prompts that are sent before their trajectories are waited for


@dataclass(slots=True, kw_only=True)
class RolloutReplay:
    """What came of it."""

    num_equal: int = 0
    num_different: int = 0
    num_same_tokens: int = 0  # of those that differ: the same tokens and reward
    num_failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    by_field: Counter[str] = field(default_factory=Counter)
    largest_gap: float = 0.0  # of log-probs of the same tokens, nats
    first: tuple[Sample, Difference] | None = None

    @property
    def is_equal(self) -> bool:
        """Whether every sample came out with the same tokens and reward, and any was fed."""
        return self.num_equal + self.num_same_tokens > 0 and not (
            self.num_failed or self.num_different - self.num_same_tokens
        )


def replay_rollout(
    recording: Recording,
    target: Target,
    weights: RecordedWeights,
    *,
    selection: Selection,
    deadline_s: float = 120.0,
) -> RolloutReplay:
    """Feed the role and compare.

    Args:
        recording: of prompts and trajectories.
        target: a fresh run.
        weights: where each version is pulled from.
        selection: samples that are meant.
        deadline_s: longest time without a new trajectory.

    Raises:
        NotRecordedError: there is nothing to feed.
        RoleEndedError, DeadlineError: the role did not do its work.
    """
    made = RolloutReplay()
    by_version = fed_by_version(recording, selection, weights.available, made)
    if not by_version:
        raise NotRecordedError(
            f"no prompt of {recording.folder} can be sampled again: "
            + ("; ".join(f"{n} {why}" for why, n in made.skipped.items()) or "it holds none")
        )
    topics = [TRAJECTORIES.name, DEAD_LETTERS.name, POLICY_PULLS.name]
    held: set[int] = set()
    open_: dict[Sample, Entry] = {}
    with (
        Outputs(target.bus, topics) as outputs,
        Feeder(target.bus) as feeder,
        SoloRole(target, "rollout", deadline_s=deadline_s) as role,
    ):

        def look() -> bool:
            records = outputs.poll(0.02)
            for record in records:
                if isinstance(record.event, PolicyLoaded):
                    held.add(record.event.policy_version)
                else:
                    _compare(recording, record, open_, made)
            return bool(records)

        for version, entries in sorted(by_version.items()):
            feeder.send([weights.announcement(version, {version})])
            role.until(lambda v=version: v in held, look, f"version {version}")  # type: ignore[misc]
            for at in range(0, len(entries), _BATCH):
                batch = entries[at : at + _BATCH]
                open_.update({_sample(entry): entry for entry in batch})
                feeder.send([_prompt(recording, entry) for entry in batch])
                role.until(lambda: not open_, look, f"{len(batch)} trajectories")
    return made


def fed_by_version(
    recording: Recording, selection: Selection, available: Set[int], made: RolloutReplay
) -> dict[int, list[Entry]]:
    """First trajectories of samples that can be sampled again, by the one version that did.

    Args:
        available: versions whose weights are at hand.
        made: told what is skipped, and why.
    """
    found: defaultdict[int, list[Entry]] = defaultdict(list)
    seen: set[Sample] = set()
    where = "f.event = 'Trajectory' AND f.topic = ? ORDER BY f.partition, r.\"offset\""
    for entry in recording.index.entries(where, [TRAJECTORIES.name]):
        if _sample(entry) in seen or not _is_meant(selection, entry):
            continue
        seen.add(_sample(entry))
        version, oldest = entry.facts.version, entry.facts.oldest_version
        if version is None or version != oldest:
            made.skipped["sampled while the weights changed"] += 1
        elif entry.facts.attempt:  # draws are keyed by it, and a replay begins with the first
            made.skipped["sampled in a later attempt"] += 1
        elif version not in available:
            made.skipped["sampled by a version whose weights are not at hand"] += 1
        else:
            found[version].append(entry)
    return dict(found)


def _is_meant(selection: Selection, entry: Entry) -> bool:
    facts = entry.facts
    return (
        (selection.groups is None or facts.group_id in selection.groups)
        and (selection.samples is None or _sample(entry) in selection.samples)
        and (selection.rows is None or facts.row in selection.rows)
        and (selection.time_ms is None or entry.timestamp_ms in selection.time_ms)
        and (selection.versions is None or (facts.version or 0) in selection.versions)
    )


def _sample(entry: Entry) -> Sample:
    return str(entry.facts.group_id), int(entry.facts.sample or 0)


def _prompt(recording: Recording, entry: Entry) -> Outgoing:
    trajectory = recording.decoded(recording.read(entry)).event
    assert isinstance(trajectory, Trajectory)
    position = Position(PROMPTS.name, trajectory.prompt_partition, trajectory.prompt_offset)
    return outgoing_of(recording.at(position), recording.manifest.run, is_part=True)


def _compare(
    recording: Recording, record: Record[object], open_: dict[Sample, Entry], made: RolloutReplay
) -> None:
    event = record.event
    group, number = getattr(event, "group_id", None), getattr(event, "sample", None)
    entry = open_.pop((str(group), int(number)), None) if number is not None else None
    if entry is None:
        return
    if not isinstance(event, Trajectory):
        made.num_failed += 1
        return
    recorded = recording.decoded(recording.read(entry)).event
    assert isinstance(recorded, Trajectory)
    found = [d for d in differing(recorded, event) if d.field != "attempt"]
    made.num_equal += not found
    made.num_different += bool(found)
    is_same = bool(found) and _says(recorded) == _says(event)
    made.num_same_tokens += is_same
    for difference in found:
        made.by_field[difference.field] += 1
        if is_same:
            made.largest_gap = max(made.largest_gap, difference.gap)
        made.first = made.first or ((str(group), int(number or 0)), difference)


def _says(trajectory: Trajectory) -> Sequence[object]:
    tokens = [bytes(segment.token_ids.data) for segment in trajectory.segments]
    return [*tokens, trajectory.reward]
