"""Replay into one real role, the log-prob worker or the rollout worker; each output is compared.

Log-prob: each `ScoredTrajectory` says which others were scored with it. The same windows are
prescribed, so the same forwards run, and with the same weights and threads every log-prob has the
same bits. Rollout: which version sampled a prompt hung on when the weights came, so each version is
announced by itself and the prompts that it sampled follow once the engine holds it. Samples that
went on while their weights changed are not fed: the log does not say at which token's instant.
Decision 0016.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rlstreams.debug.replay.fields import Difference, differing
from rlstreams.debug.replay.player import outgoing_of
from rlstreams.debug.replay.solo import Feeder, Outputs, SoloRole
from rlstreams.debug.replay.target import Target
from rlstreams.debug.replay.weights import RecordedWeights
from rlstreams.schemas import encode
from rlstreams.schemas.events import Event, PolicyLoaded, ScoredTrajectory, Trajectory
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.fencing import FirstRecords
from rlstreams.streams.log.record import WINDOW_HEADER, Outgoing, Position, Record
from rlstreams.streams.log.text import counted
from rlstreams.streams.log.topics import (
    DEAD_LETTERS,
    POLICY_PULLS,
    PROMPTS,
    SCORED,
    TRAJECTORIES,
)
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.streams.recording.selection import Selection, facts_of

AHEAD = 4  # windows that were sent and are not scored yet
DEADLINE_S = 120.0  # without any output
_BATCH = 500  # prompts that are sent before their trajectories are waited for
_THINGS = {
    "logprob": ("scored trajectory", "scored trajectories"),
    "rollout": ("trajectory", "trajectories"),
}

Sample = tuple[str, int]


class Fed(NamedTuple):
    """A sample that can be sampled again: where its records lie."""

    sample: Sample
    trajectory: Position
    prompt: Position


@dataclass(slots=True, kw_only=True)
class RoleReplay:
    """What a role made of its recorded inputs."""

    role: str = "logprob"
    num_equal: int = 0
    num_different: int = 0
    num_same_tokens: int = 0  # rollout, of those that differ: the same tokens and reward
    num_failed: int = 0  # made then, a dead letter now
    skipped: Counter[str] = field(default_factory=Counter)  # why it was not fed, and how many
    by_field: Counter[str] = field(default_factory=Counter)
    largest_gap: float = 0.0
    first: tuple[Sample, Difference] | None = None

    @property
    def is_equal(self) -> bool:
        """Whether everything that was fed came out alike, and something was fed.

        Of a rollout the same tokens and reward suffice: the log-probs of a sampler hang on what
        else it sampled at the same time.
        """
        num_alike = self.num_equal + self.num_same_tokens
        return num_alike > 0 and not self.num_failed and self.num_different == self.num_same_tokens

    def compare(self, sample: Sample, recorded: Event, made: Event) -> None:
        """Count one output against the recorded one."""
        found = [d for d in differing(recorded, made) if d.field != "attempt"]
        self.num_equal += not found
        self.num_different += bool(found)
        is_same = bool(found) and isinstance(made, Trajectory) and _says(recorded) == _says(made)
        self.num_same_tokens += is_same
        for difference in found:
            self.by_field[difference.field] += 1
            if is_same or self.role == "logprob":
                self.largest_gap = max(self.largest_gap, difference.gap)
            self.first = self.first or (sample, difference)

    def lines(self) -> list[str]:
        """For the terminal."""
        found = [f"{counted(self.num_equal, *_THINGS[self.role])} equal, bit for bit; "]
        if self.role == "logprob":
            found[0] += f"{self.num_different:,} different, {self.num_failed:,} not scored"
        else:
            num_other = self.num_different - self.num_same_tokens
            found[0] += (
                f"{self.num_same_tokens:,} with the same tokens and reward (log-probs at most "
                f"{self.largest_gap:.3g} apart), {num_other:,} with others, "
                f"{self.num_failed:,} failed"
            )
        found += [f"  {name}: in {count:,}" for name, count in self.by_field.most_common()]
        if self.first is not None and self.role == "logprob":
            (group, number), difference = self.first
            found += [
                f"  largest distance {self.largest_gap:.3g}",
                f"first: sample {group}/{number}, {difference.path}: "
                f"{difference.one} recorded, {difference.other} now",
            ]
            found += [f"    {difference.context}"] if difference.context else []
        return found + [f"{count:,} not fed: {why}" for why, count in self.skipped.most_common()]


class _Run:
    """A role that runs: what was fed to it, until its output was compared."""

    def __init__(self, made: RoleReplay, feeder: Feeder, outputs: Outputs, role: SoloRole) -> None:
        self._made = made
        self._outputs = outputs
        self._role = role
        self.feeder = feeder
        self.open: dict[Sample, Callable[[], Event]] = {}  # the recorded output, read when needed
        self.held: set[int] = set()  # versions that the role pulled

    def wait(self, reached: Callable[[], bool], waiting_for: str) -> None:
        """Compare what the role writes, until something is reached."""
        self._role.until(reached, self._look, waiting_for)

    def _look(self) -> bool:
        records = self._outputs.poll(0.02)
        for record in records:
            event = record.event
            if isinstance(event, PolicyLoaded):
                self.held.add(event.policy_version)
                continue
            facts = facts_of(event)
            sample = (str(facts.group_id), -1 if facts.sample is None else facts.sample)
            recorded = self.open.pop(sample, None)
            if recorded is None:
                continue
            if isinstance(event, Trajectory | ScoredTrajectory):
                self._made.compare(sample, recorded(), event)
            else:
                self._made.num_failed += 1
        return bool(records)


def replay_into(
    role: str,
    recording: Recording,
    target: Target,
    weights: RecordedWeights,
    selection: Selection,
) -> RoleReplay:
    """Feed the role and compare.

    Args:
        selection: windows of which a sample is meant, or samples that are meant.

    Raises:
        NotRecordedError: there is nothing to feed, or no weights to feed it with.
        RoleEndedError, DeadlineError: the role did not do its work.
    """
    made = RoleReplay(role=role)
    if not weights.available:
        raise NotRecordedError(
            f"no weights of versions {sorted(weights.known)} are available: record with --weights, "
            "or make them with `replay --into trainer --keep-weights` and name them with --weights"
        )
    by_version: dict[int, list[Fed]] = {}
    if role == "rollout":
        by_version = fed_by_version(recording, selection, weights.available, made)
        if not by_version:
            raise NotRecordedError(
                f"no prompt of {recording.folder} can be sampled again: "
                + ("; ".join(f"{n} {why}" for why, n in made.skipped.items()) or "it holds none")
            )
    topics = [SCORED] if role == "logprob" else [TRAJECTORIES, POLICY_PULLS]
    with (
        Outputs(target.bus, [topic.name for topic in (*topics, DEAD_LETTERS)]) as outputs,
        Feeder(target.bus) as feeder,
        SoloRole(target, role, deadline_s=DEADLINE_S) as solo,
    ):
        run = _Run(made, feeder, outputs, solo)
        if role == "logprob":
            served = weights.available
            feeder.send([weights.announcement(version, served) for version in sorted(served)])
            _feed_windows(run, recording, _replayable(recording, selection, served, made))
        else:
            for version, samples in sorted(by_version.items()):
                feeder.send([weights.announcement(version, {version})])
                run.wait(lambda v=version: v in run.held, f"version {version}")  # type: ignore[misc]
                _feed_prompts(run, recording, samples)
    return made


def _feed_windows(
    run: _Run, recording: Recording, windows: Iterator[list[Record[ScoredTrajectory]]]
) -> None:
    for window in windows:
        run.feeder.send(_prescribed(recording, window))
        for scored in window:
            event = scored.event
            sample = event.trajectory.group_id, event.trajectory.sample
            run.open[sample] = lambda e=event: e  # type: ignore[misc]
        limit = AHEAD * len(window)
        run.wait(lambda n=limit: len(run.open) <= n, f"{len(run.open)} scores")  # type: ignore[misc]
    run.wait(lambda: not run.open, f"the last {len(run.open)} scores")


def _feed_prompts(run: _Run, recording: Recording, samples: Sequence[Fed]) -> None:
    name = recording.manifest.run

    def recorded(position: Position) -> Callable[[], Event]:
        return lambda: recording.decoded(recording.at(position)).event

    for at in range(0, len(samples), _BATCH):
        batch = samples[at : at + _BATCH]
        run.open.update({fed.sample: recorded(fed.trajectory) for fed in batch})
        prompts = [recording.at(fed.prompt) for fed in batch]
        run.feeder.send([outgoing_of(raw, name, is_part=True) for raw in prompts])
        run.wait(lambda: not run.open, f"{len(batch)} trajectories")


def fed_by_version(
    recording: Recording, selection: Selection, available: Set[int], made: RoleReplay
) -> dict[int, list[Fed]]:
    """First trajectories of samples that can be sampled again, by the one version that did.

    Args:
        available: versions whose weights are at hand.
        made: counts what is skipped, and why.
    """
    found: defaultdict[int, list[Fed]] = defaultdict(list)
    firsts = FirstRecords()
    for record in recording.events(Trajectory):
        event = record.event
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
            sample = event.group_id, event.sample
            found[facts.version].append(Fed(sample, record.position, prompt))
    return dict(found)


def _replayable(
    recording: Recording, selection: Selection, available: Set[int], made: RoleReplay
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


def _windows(recording: Recording, made: RoleReplay) -> Iterator[list[Record[ScoredTrajectory]]]:
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
        return outgoing_of(raw, recording.manifest.run, is_part=True)
    made = outgoing(TRAJECTORIES, scored.trajectory, partition=scored.trajectory_partition)
    return replace(made, value=encode(scored.trajectory))


def _says(event: Event) -> Sequence[object]:
    assert isinstance(event, Trajectory)
    return [*(bytes(segment.token_ids.data) for segment in event.segments), event.reward]
