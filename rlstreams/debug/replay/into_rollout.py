"""The recorded prompts into the real rollout role, version by version; every trajectory compared.

Which version sampled a prompt hung on when the weights came, so each version is announced by itself
and the prompts that it sampled follow once the engine holds it. Samples that went on while their
weights changed are not fed: where that happened is not in the log to the token's instant.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from rlstreams.debug.replay.fields import Difference, differing
from rlstreams.debug.replay.player import outgoing_of
from rlstreams.debug.replay.solo import Feeder, Outputs, SoloRole
from rlstreams.debug.replay.target import Target
from rlstreams.debug.replay.weights import RecordedWeights
from rlstreams.schemas.events import PolicyLoaded, Trajectory
from rlstreams.streams.log.fencing import FirstRecords
from rlstreams.streams.log.record import Position, Record
from rlstreams.streams.log.topics import DEAD_LETTERS, POLICY_PULLS, PROMPTS, TRAJECTORIES
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.streams.recording.facts import facts_of
from rlstreams.streams.recording.selection import Selection

Sample = tuple[str, int]
_BATCH = 500  # prompts that are sent before their trajectories are waited for


class Fed(NamedTuple):
    """A sample that can be sampled again: where its records lie."""

    sample: Sample
    trajectory: Position
    prompt: Position


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
    open_: dict[Sample, Fed] = {}
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

        for version, samples in sorted(by_version.items()):
            feeder.send([weights.announcement(version, {version})])
            role.until(lambda v=version: v in held, look, f"version {version}")  # type: ignore[misc]
            for at in range(0, len(samples), _BATCH):
                batch = samples[at : at + _BATCH]
                open_.update({fed.sample: fed for fed in batch})
                prompts = [recording.at(fed.prompt) for fed in batch]
                run = recording.manifest.run
                feeder.send([outgoing_of(raw, run, is_part=True) for raw in prompts])
                role.until(lambda: not open_, look, f"{len(batch)} trajectories")
    return made


def fed_by_version(
    recording: Recording, selection: Selection, available: Set[int], made: RolloutReplay
) -> dict[int, list[Fed]]:
    """First trajectories of samples that can be sampled again, by the one version that did.

    Args:
        available: versions whose weights are at hand.
        made: counts what is skipped, and why.
    """
    found: defaultdict[int, list[Fed]] = defaultdict(list)
    firsts = FirstRecords()
    for record in recording.events(Trajectory):
        event, sample = record.event, (record.event.group_id, record.event.sample)
        if not firsts.admits(event) or not selection.wants(record.raw, event):
            continue
        facts = facts_of(event)
        if facts.version is None or facts.version != facts.oldest_version:
            made.skipped["sampled while the weights changed"] += 1
        elif event.attempt:  # draws are keyed by it, and a replay begins with the first
            made.skipped["sampled in a later attempt"] += 1
        elif facts.version not in available:
            made.skipped["sampled by a version whose weights are not at hand"] += 1
        else:
            prompt = Position(PROMPTS.name, event.prompt_partition, event.prompt_offset)
            found[facts.version].append(Fed(sample, record.position, prompt))
    return dict(found)


def _compare(
    recording: Recording, record: Record[object], open_: dict[Sample, Fed], made: RolloutReplay
) -> None:
    event = record.event
    group, number = getattr(event, "group_id", None), getattr(event, "sample", None)
    fed = open_.pop((str(group), int(number)), None) if number is not None else None
    if fed is None:
        return
    if not isinstance(event, Trajectory):
        made.num_failed += 1
        return
    recorded = recording.decoded(recording.at(fed.trajectory)).event
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
        made.first = made.first or (fed.sample, difference)


def _says(trajectory: Trajectory) -> Sequence[object]:
    tokens = [bytes(segment.token_ids.data) for segment in trajectory.segments]
    return [*tokens, trajectory.reward]
