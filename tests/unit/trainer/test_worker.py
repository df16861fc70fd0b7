"""The trainer on the in-memory log: steps, redo, drops, zombies."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from schemas.events import (
    DeadLetter,
    Event,
    GroupsDropped,
    PolicyPublished,
    ScoredTrajectory,
    Segment,
    SegmentScore,
    StepCompleted,
    Tensor,
    TrainerStarted,
)
from streams.codec import decoded, outgoing
from streams.errors import FencedError
from streams.memory import MemoryBus
from streams.memory_log import MemoryLog
from streams.record import Outgoing
from streams.topics import DEAD_LETTERS, POLICY_VERSIONS, SCORED, STEPS, TOPICS
from tests import factories
from workers.config import RunConfig
from workers.config_load import load
from workers.context import Context
from workers.runtime import OwnerAliveError
from workers.trainer.redo import RedoError
from workers.trainer.training import Training
from workers.trainer.worker import TrainerWorker
from workers.weights.file import FileWeightServer

EXAMPLE = Path(__file__).parents[3] / "infra/examples/demo.toml"
DEADLINE_S = 30.0


def make_config(folder: Path, **overrides: object) -> RunConfig:
    values = {
        "run.dir": str(folder),
        "trainer.steps": 3,
        "trainer.groups_per_step": 1,
        "trainer.checkpoint_every": 100,
        "deadlines.lease_s": 0.3,
        "prompts.group_size": 2,
    } | {key.replace("__", "."): value for key, value in overrides.items()}
    return load([EXAMPLE], [f"{key}={value}" for key, value in values.items()])


def make_log() -> MemoryLog:
    log = MemoryLog()
    for topic in TOPICS:
        log.create(f"demo.{topic.name}", 1)
    return log


def make_trainer(log: MemoryLog, config: RunConfig, instance: str = "one") -> TrainerWorker:
    bus = MemoryBus(log, "demo")
    context = Context(config=config, bus=bus, role="trainer", ordinal=0, instance=instance)
    training = Training(Path(config.model.path), config.trainer, threads=1)
    return TrainerWorker(context, bus, training, FileWeightServer(context.folder / "weights", 4))


def scored(group: int, sample: int, version: int, **changes: object) -> ScoredTrajectory:
    draw = np.random.default_rng((group, sample))
    tokens = draw.integers(4, 100, 5).astype(np.int32)
    logprobs = Tensor.of(np.full(5, -1.0, np.float32))
    values = {
        "group_id": str(group),
        "sample": sample,
        "group_size": 2,
        "row": group,
        "reward": float(sample),
        "segments": (
            Segment(author="prompt", token_ids=Tensor.of(np.array([1, 5, 6], np.int32))),
            Segment(
                author="policy",
                token_ids=Tensor.of(tokens),
                policy_version=version,
                behavior_logprobs=logprobs,
                finish_reason="stop",
            ),
        ),
    } | changes
    score = SegmentScore(
        segment=1, anchor="sampled", policy_version=version, proximal_logprobs=logprobs
    )
    return ScoredTrajectory(trajectory=factories.trajectory(**values), scores=(score,))


def send(log: MemoryLog, *events: Event | Outgoing) -> None:
    records = [
        event
        if isinstance(event, Outgoing)
        else outgoing(DEAD_LETTERS if isinstance(event, DeadLetter) else SCORED, event)
        for event in events
    ]
    MemoryBus(log, "demo").producer("logprob.0").commit(records)


def read(log: MemoryLog, topic: str) -> list[Event]:
    bus = MemoryBus(log, "demo")
    return [decoded(raw).event for raw in bus.reader(bus.beginnings(topic)).poll(10_000, 0.0)]


def steps(log: MemoryLog) -> list[StepCompleted]:
    return [event for event in read(log, STEPS.name) if isinstance(event, StepCompleted)]


def turn_until(trainer: TrainerWorker, reached: object) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():  # type: ignore[operator]
        assert time.monotonic() < deadline, "not reached in time"
        trainer.turn()


def run_steps(log: MemoryLog, trainer: TrainerWorker, num: int) -> None:
    turn_until(trainer, lambda: len(steps(log)) >= num)


def test_each_step_is_committed_before_its_version_is_published(tmp_path: Path) -> None:
    """Three groups make three steps; the ledger holds all that redo needs."""
    log, config = make_log(), make_config(tmp_path)
    trainer = make_trainer(log, config)
    for version in range(3):
        send(log, *(scored(version, sample, version) for sample in range(2)))
        run_steps(log, trainer, version + 1)
    turn_until(trainer, lambda: trainer.done)
    trainer.close()
    done = steps(log)
    assert [s.step for s in done] == [1, 2, 3]
    assert [[(r.group_id, r.sample) for r in s.samples] for s in done] == [
        [(str(group), 0), (str(group), 1)] for group in range(3)
    ]
    assert [s.staleness for s in done] == [{"0": 10}] * 3
    assert done[1].previous_hash == done[0].weight_hash != done[1].weight_hash
    assert done[-1].closed.watermark == 3
    published = [e for e in read(log, POLICY_VERSIONS.name) if isinstance(e, PolicyPublished)]
    assert [(p.policy_version, p.weight_hash) for p in published[1:]] == [
        (s.policy_version, s.weight_hash) for s in done
    ]


def test_a_successor_redoes_the_steps_and_gets_the_recorded_hash(tmp_path: Path) -> None:
    """Killed without a checkpoint, it executes the ledger again, bit for bit, then goes on."""
    log, config = make_log(), make_config(tmp_path)
    first = make_trainer(log, config)
    for version in range(2):
        send(log, *(scored(version, sample, version) for sample in range(2)))
        run_steps(log, first, version + 1)
    time.sleep(0.4)  # the lease passes in silence, as after a kill
    second = make_trainer(log, config, instance="two")
    send(log, *(scored(2, sample, 2) for sample in range(2)))
    run_steps(log, second, 3)
    last = steps(log)[-1]
    assert (last.epoch, last.step, last.previous_hash) == (2, 3, steps(log)[1].weight_hash)
    with pytest.raises(FencedError):
        turn_until(first, lambda: False)
    second.close()


def test_a_redo_that_gives_other_weights_stops_the_run(tmp_path: Path) -> None:
    """`redo = "exact"` refuses to go on from weights that are not the recorded ones."""
    log, config = make_log(), make_config(tmp_path)
    first = make_trainer(log, config)
    send(log, *(scored(0, sample, 0) for sample in range(2)))
    run_steps(log, first, 1)
    first.close()
    time.sleep(0.4)
    second = make_trainer(log, config, instance="two")
    second._training.learner.configure = lambda *_: None  # type: ignore[method-assign]
    second._training.learner._section = config.trainer.optimizer.__class__(lr=1.0)
    with pytest.raises(RedoError, match="ledger says"):
        turn_until(second, lambda: False)


def test_a_living_owner_is_not_replaced(tmp_path: Path) -> None:
    """A second trainer refuses while the first one writes heartbeats."""
    log, config = make_log(), make_config(tmp_path, deadlines__lease_s=5.0)
    first = make_trainer(log, config)
    first.turn()
    beat = outgoing(STEPS, factories.heartbeat(run="demo", epoch=1, instance="one"))

    class Beating(MemoryBus):
        """The owner writes as soon as somebody watches."""

        def reader(self, offsets: object = None) -> object:  # type: ignore[override]
            reader = super().reader(offsets)  # type: ignore[arg-type]
            poll = reader.poll

            def beating_poll(max_records: int, timeout_s: float) -> object:
                if reader.positions()[next(iter(reader.positions()))] >= 1:
                    first._office._producer.commit([beat])
                return poll(max_records, timeout_s)

            reader.poll = beating_poll  # type: ignore[method-assign]
            return reader

    context = Context(
        config=config, bus=Beating(log, "demo"), role="trainer", ordinal=0, instance="two"
    )
    training = Training(Path(config.model.path), config.trainer, threads=1)
    with pytest.raises(OwnerAliveError, match="epoch 1"):
        TrainerWorker(context, context.bus, training, FileWeightServer(tmp_path / "w", 4))
    claims = [e for e in read(log, STEPS.name) if isinstance(e, TrainerStarted)]
    assert [claim.instance for claim in claims] == ["one"]


def test_a_dead_sample_drops_its_group_without_waiting_for_a_step(tmp_path: Path) -> None:
    """The drop names the row, so that it can be replaced."""
    log, config = make_log(), make_config(tmp_path)
    trainer = make_trainer(log, config)
    send(log, scored(0, 0, 0), factories.dead_letter(group_id="0", sample=1, row=0))
    turn_until(trainer, lambda: any(isinstance(e, GroupsDropped) for e in read(log, STEPS.name)))
    (drop,) = [e for e in read(log, STEPS.name) if isinstance(e, GroupsDropped)]
    assert [(g.group_id, g.reason, g.row) for g in drop.groups] == [("0", "dead_samples", 0)]
    assert drop.closed.watermark == 1
    trainer.close()


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_sample_with_a_bad_number_is_buried_and_its_group_dropped(
    tmp_path: Path, reward: float
) -> None:
    """NaN never reaches the weights; the letter has the record's place."""
    log, config = make_log(), make_config(tmp_path)
    trainer = make_trainer(log, config)
    send(log, scored(0, 0, 0, reward=reward), scored(0, 1, 0))
    turn_until(trainer, lambda: any(isinstance(e, GroupsDropped) for e in read(log, STEPS.name)))
    (letter,) = [e for e in read(log, DEAD_LETTERS.name) if isinstance(e, DeadLetter)]
    assert (letter.group_id, letter.sample, letter.reason) == ("0", 0, "validation")
    assert (letter.origin_topic, letter.origin_offset) == (SCORED.name, 0)
    trainer.close()


def test_a_drain_leaves_a_checkpoint_that_the_next_one_starts_from(tmp_path: Path) -> None:
    """After a clean stop nothing is redone, and no lease is waited for."""
    log, config = make_log(), make_config(tmp_path, deadlines__lease_s=60.0)
    first = make_trainer(log, config)
    send(log, *(scored(0, sample, 0) for sample in range(2)))
    run_steps(log, first, 1)
    first.drain()
    turn_until(first, lambda: first.done)
    first.close()
    second = make_trainer(log, config, instance="two")
    turn_until(second, lambda: second._reporter.policy_version == 1)
    assert second._saved_step == 1
    second.close()
