"""A trainer dies at every crash point, again and again; what it leaves is one run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rlstreams.debug.rerun.rebuilt import steps_again
from rlstreams.schemas.events import DeadLetter, GroupsDropped, PolicyPublished, StepsRedone
from rlstreams.streams.log.crash_points import CrashPoint, Hook, arm
from rlstreams.streams.log.topics import DEAD_LETTERS, POLICY_VERSIONS, STEPS
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore
from rlstreams.workers.weights.file import FileWeightChannel
from tests import factories
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    read,
    scored,
    send,
    steps,
    tick_until,
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog
from tests.unit.workers.crashing import Killed, kill_at

NUM_STEPS = 3
# The trainer commits no positions of a group: OFFSETS_* are not on its way.
POINTS = [point for point in CrashPoint if not point.startswith("offsets")]


def live(log: MemoryLog, config: RunConfig, death: Hook, lives: int) -> bool:
    """One life; whether it came to its end."""
    trainer = None
    arm(death)
    try:
        trainer = make_trainer(log, config, f"life-{lives}", takeover=True)
        tick_until(trainer, lambda: trainer.done)
    except Killed:
        return False
    finally:
        arm(None)
        if trainer is not None:
            bury(trainer)
    return True


def check(log: MemoryLog, config: RunConfig) -> None:
    """Each sample once, one letter, one drop, and weights that follow from the log."""
    done = steps(log)
    assert [1, 2, 3] == [step.step for step in done]
    trained = Counter((ref.group_id, ref.sample) for step in done for ref in step.samples)
    assert {(str(g), s): 1 for g in (2, 3, 4) for s in (0, 1)} == trained
    drops = [e for e in read(log, STEPS.name) if isinstance(e, GroupsDropped)]
    assert ["0", "1"] == sorted(g.group_id for drop in drops for g in drop.groups)
    letters = [e for e in read(log, DEAD_LETTERS.name) if isinstance(e, DeadLetter)]
    assert [("0", 1), ("1", 0)] == sorted((e.group_id, e.sample) for e in letters)
    bus = MemoryBus(log, "demo")
    again = list(steps_again(bus, config))
    assert [step.weight_hash for step in done] == [step.again.weight_hash for step, _ in again]
    for told in (e for e in read(log, STEPS.name) if isinstance(e, StepsRedone)):
        assert told.num_equal == told.last_step - told.first_step + 1
    check_versions(log, [step.weight_hash for step in done])
    newest = CheckpointStore(Path(config.folder) / "checkpoints").newest(lambda _: "")
    assert (NUM_STEPS, done[-1].weight_hash) == (newest.manifest.step, newest.manifest.weight_hash)


def check_versions(log: MemoryLog, hashes: list[str]) -> None:
    published = [e for e in read(log, POLICY_VERSIONS.name) if isinstance(e, PolicyPublished)]
    by_version = {event.policy_version: event for event in published}
    assert hashes == [by_version[version].weight_hash for version in (1, 2, 3)]
    assert len(by_version) == len({(e.policy_version, e.weight_hash) for e in published})
    assert dict(FileWeightChannel().pull(by_version[NUM_STEPS], 10.0))


@pytest.mark.parametrize("point", POINTS)
def test_it_may_die_anywhere(tmp_path: Path, point: CrashPoint) -> None:
    """Each life ends a little later on its way; the last one finds nothing lost or done twice."""
    log = make_log()
    config = make_config(
        tmp_path, trainer__steps=NUM_STEPS, trainer__max_staleness=3, trainer__checkpoint_every=2
    )
    send(
        log,
        scored(0, 0, 0),
        factories.dead_letter(group_id="0", sample=1, row=0),
        scored(1, 0, 0, reward=float("nan")),
        *(scored(group, sample, 0) for group in (2, 3, 4) for sample in range(2)),
    )
    count = lives = 1
    while not live(log, config, kill_at(point, count), lives):
        count, lives = count + 1 + count // 4, lives + 1
    assert lives > 1, "it never died"
    check(log, config)
