"""The recorded samples into the real trainer, step by step; every step compared as it is made.

What is proven: given the samples of a recorded step, the trainer plans the same batch (order,
masks, borders), and makes the same loss and the same weights, bit for bit, from step 1 on and
without any weights from the recording. What is not: which groups were complete when it planned.
That hung on the clock of the recorded run, so it is taken from the recorded steps, by feeding them
one by one.
Groups that were dropped because their time was over are therefore not fed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rlstreams.debug.replay.fields import Difference, differing
from rlstreams.debug.replay.history import History, eras, history_of
from rlstreams.debug.replay.player import outgoing_of
from rlstreams.debug.replay.solo import Feeder, Outputs, SoloRole
from rlstreams.debug.replay.target import Target
from rlstreams.schemas import encode
from rlstreams.schemas.events import DeadLetter, DroppedGroup, StepCompleted
from rlstreams.streams.log.record import Outgoing, Position
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED, STEPS
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.workers.config.run import RunConfig

END_S = 60.0
ELSEWHERE = ("closed", "rng")  # fields of a step that hang on groups that are not fed
TIMED_OUT = "incomplete"  # why a group was dropped that only a clock can tell


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One step, made again by the trainer."""

    recorded: StepCompleted
    again: StepCompleted
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReplay:
    """All of them."""

    steps: tuple[ReplayedStep, ...]
    num_fed: int  # scored trajectories
    num_not_fed: int  # groups that were dropped because of the time
    last_step: int  # that the recording holds

    @property
    def num_equal(self) -> int:
        """Steps without any difference."""
        return sum(not step.differences for step in self.steps)


def replay_trainer(
    recording: Recording,
    target: Target,
    *,
    last_step: int = 0,
    keep_weights: bool = False,
    deadline_s: float = 120.0,
    on_step: Callable[[ReplayedStep], None] = lambda _: None,
) -> TrainerReplay:
    """Feed the trainer from step 1 to `last_step` (0: the last one recorded).

    Args:
        recording: of a run from its first step on.
        target: a fresh run.
        last_step: the replay ends with it.
        keep_weights: keep the weights of every version in the fresh run's folder.
        deadline_s: longest time for one step.
        on_step: told of each step as it is made.

    Raises:
        NotRecordedError: steps or samples are missing from the recording.
        RoleEndedError, DeadlineError: the trainer did not do its work.
    """
    history = history_of(recording)
    wanted = last_step or len(history.steps)
    _check(recording, history, wanted)
    done: list[ReplayedStep] = []
    with Outputs(target.bus, [STEPS.name]) as outputs, Feeder(target.bus) as feeder:
        player = _TrainerFeed(recording, history, feeder)
        ended: list[str] = []
        for era in eras(history, wanted):
            config = _era_config(history, era, target, keep_weights, wanted)
            place = target.configured(config)
            with SoloRole(place, "trainer", deadline_s=deadline_s, reaped=ended) as role:
                for step in _made(role, outputs, player, era):
                    on_step(step)
                    done.append(step)
                role.join(END_S)
                ended.append(role.instance)
    return TrainerReplay(
        steps=tuple(done),
        num_fed=player.num_fed,
        num_not_fed=player.num_not_fed,
        last_step=len(history.steps),
    )


def _made(
    role: SoloRole, outputs: Outputs, player: _TrainerFeed, era: Sequence[StepCompleted]
) -> Iterator[ReplayedStep]:
    made: dict[int, StepCompleted] = {}

    def look() -> bool:
        records = outputs.poll(0.05)
        for record in records:
            if isinstance(record.event, StepCompleted):
                made.setdefault(record.event.step, record.event)
        return any(isinstance(record.event, StepCompleted) for record in records)

    for recorded in era:
        player.feed_step(recorded)
        role.until(lambda n=recorded.step: n in made, look, f"step {recorded.step}")  # type: ignore[misc]
        again = made[recorded.step]
        found = tuple(d for d in differing(recorded, again) if not d.path.startswith(ELSEWHERE))
        yield ReplayedStep(recorded=recorded, again=again, differences=found)
        player.feed_drops(recorded.step)


class _TrainerFeed:
    """Sends what the trainer had read when it planned a step."""

    def __init__(self, recording: Recording, history: History, feeder: Feeder) -> None:
        self._recording = recording
        self._history = history
        self._feeder = feeder
        self._run = recording.manifest.run
        self.num_fed = self.num_not_fed = 0
        self.feed_drops(0)

    def feed_step(self, step: StepCompleted) -> None:
        """Its samples, and the letters about those of its groups that are absent."""
        positions = [Position(SCORED.name, ref.partition, ref.offset) for ref in step.samples]
        raws = [self._recording.at(position) for position in sorted(positions)]
        absent = {(absent.group_id, absent.sample) for absent in step.absent}
        letters = [out for group, sample in sorted(absent) for out in self._letters(group, sample)]
        self._feeder.send([*letters, *(outgoing_of(raw, self._run, is_part=True) for raw in raws)])
        self.num_fed += len(raws)

    def feed_drops(self, after_step: int) -> None:
        """Groups that were dropped between this step and the next, for the trainer to drop."""
        for group in self._history.dropped.get(after_step, ()):
            records = self._of_dropped(group)
            self.num_not_fed += not records
            if records:
                self._feeder.send(records)

    def _of_dropped(self, group: DroppedGroup) -> list[Outgoing]:
        if group.reason == TIMED_OUT:
            return []
        letters = self._letters(group.group_id)
        if letters:
            return letters  # they alone doom it, as they did
        scored = self._recording.keyed(SCORED.name, [group.group_id.encode()])
        return [outgoing_of(raw, self._run, is_part=True) for raw in scored]

    def _letters(self, group_id: str, sample: int | None = None) -> list[Outgoing]:
        found = []
        for raw in self._recording.keyed(DEAD_LETTERS.name, [group_id.encode()]):
            letter = self._recording.event(raw)
            if isinstance(letter, DeadLetter) and sample in (None, letter.sample):
                value = encode(_without_origin(letter))
                found.append(outgoing_of(raw, self._run, value, is_part=True))
        return found


def _without_origin(letter: DeadLetter) -> DeadLetter:
    """It names a position of the recorded log, which is another record's in the fresh one."""
    if letter.origin_topic != SCORED.name:
        return letter
    return replace(letter, origin_partition=-1, origin_offset=-1)


def _era_config(
    history: History,
    era: Sequence[StepCompleted],
    target: Target,
    keep_weights: bool,
    last_step: int,
) -> RunConfig:
    recorded = history.config_of(era[0])
    config = replace(
        target.config,
        model=recorded.model,
        trainer=replace(recorded.trainer, steps=era[-1].step),
    )
    if keep_weights:
        kept = max(config.weights.versions_served, last_step + 1)
        config = replace(config, weights=replace(config.weights, versions_served=kept))
    return config


def _check(recording: Recording, history: History, last_step: int) -> None:
    """Everything that the steps used is there."""
    if last_step > len(history.steps):
        raise NotRecordedError(
            f"step {last_step} is not recorded: {recording.folder} holds steps 1 to "
            f"{len(history.steps)}"
        )
    if not last_step:
        raise NotRecordedError(f"{recording.folder} holds no completed step")
    drifted = [step for step in history.drifts if step < last_step]
    if drifted:
        raise NotRecordedError(
            f"at step {drifted[0]} the run went on with other weights than its log makes "
            f"(RedoDrifted); the trainer can be replayed up to it: --to step:{drifted[0]}"
        )
    for step in history.steps[:last_step]:
        for ref in step.samples:
            position = Position(SCORED.name, ref.partition, ref.offset)
            if recording.find(position) is None:
                raise NotRecordedError(
                    f"step {step.step} trained on {ref.group_id}/{ref.sample} at {position}, "
                    "which the recording does not hold: record without a selection, or "
                    "--steps 1:N"
                )
