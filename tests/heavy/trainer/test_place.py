"""Log-probs by the trainer itself, or by nobody: the same log, redone to the bit, and clean."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.debug.rerun.rebuilt import steps_again
from rlstreams.schemas.events import PolicyPublished, ScoredTrajectory, StepsRedone
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import (
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
)
from rlstreams.workers.bootstrap.parts import make_role
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.runtime import Pausable
from rlstreams.workers.trainer.worker import TrainerWorker
from tests import factories
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    read,
    scored,
    steps,
    tick_until,
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog

PLACES: dict[str, dict[str, object]] = {
    "trainer": {"trainer__loss__proximal": "step_start"},
    "off": {"trainer__loss__proximal": "behavior", "trainer__loss__correction": "none"},
}
TAUGHT = {
    "trainer__loss__kind": "distill",
    "trainer__loss__advantage": "one",
    "logprob__reference": str(make_config(Path("unused")).model.path),
}
LOSSES: dict[str, tuple[str, dict[str, object]]] = {
    "trainer": ("trainer", {}),
    "trainer, beside a reference": ("trainer", {"trainer__loss__kl_coef": 0.5}),
    "off": ("off", {}),
    "off, beside a teacher": ("off", TAUGHT),
}


def config_of(folder: Path, place: str, **changes: object) -> RunConfig:
    return make_config(folder, logprob__place=place, **(PLACES.get(place, {}) | changes))


def worker_of(log: MemoryLog, config: RunConfig) -> Pausable:
    bus = MemoryBus(log, "demo")
    context = Context(config=config, bus=bus, role="logprob", ordinal=0, instance="passing")
    return make_role(context)


def trainer_of(log: MemoryLog, config: RunConfig, instance: str) -> TrainerWorker:
    return make_trainer(log, config, instance, takeover=True)


def published(log: MemoryLog) -> dict[int, PolicyPublished]:
    events = [e for e in read(log, POLICY_VERSIONS.name) if isinstance(e, PolicyPublished)]
    return {event.policy_version: event for event in events}


def train(log: MemoryLog, worker: Pausable, trainer: TrainerWorker, group: int) -> None:
    """One step more: prompts, a load and trajectories lie there, the roles do the rest."""
    tick_until(trainer, lambda: group in published(log))
    version, load_id = published(log)[group], f"rollout-0/{group}"
    held = {"policy_version": group, "weight_hash": version.weight_hash, "load_id": load_id}
    records = [outgoing(POLICY_PULLS, factories.policy_loaded(epoch=version.epoch, **held))]
    for sample in range(2):
        one = scored(group, sample, group).trajectory
        said = replace(one.segments[1], **held)
        asked = factories.prompt(group_id=str(group), sample=sample, group_size=2, row=group)
        records += [
            outgoing(PROMPTS, asked),
            outgoing(TRAJECTORIES, replace(one, segments=(one.segments[0], said))),
        ]
    MemoryBus(log, "demo").producer("rollout.0").commit(records)

    def is_done() -> bool:
        worker.tick()
        return len(steps(log)) > group

    tick_until(trainer, is_done)


@pytest.mark.parametrize(("place", "changes"), LOSSES.values(), ids=LOSSES)
def test_a_run_is_redone_and_clean(tmp_path: Path, place: str, changes: dict[str, object]) -> None:
    """The worker holds no model, or the reference alone."""
    log, config = make_log(), config_of(tmp_path, place, **changes)
    bus = MemoryBus(log, "demo")
    worker = worker_of(log, config)
    first = trainer_of(log, config, "one")
    for group in range(2):
        train(log, worker, first, group)
    bury(first)
    with closing(trainer_of(log, config, "two")) as second:
        train(log, worker, second, 2)
        (redone,) = [e for e in read(log, STEPS.name) if isinstance(e, StepsRedone)]
        assert (1, 2, 2) == (redone.first_step, redone.last_step, redone.num_equal)
    worker.close()
    report = audit(bus, settle_s=0)
    assert report.breach_counts == {}
    assert (6, 0, 0) == (report.trained, report.dead_lettered, report.lost)
    for event in read(log, SCORED.name):
        assert isinstance(event, ScoredTrajectory)
        assert [score.anchor for score in event.scores] == ["behavior"]
        assert [bool(changes)] == [score.reference_logprobs is not None for score in event.scores]
    last = steps(log)[-1]
    assert (place == "trainer") == ("rollout_k3" in last.metrics)
    assert bool(changes) == ("kl_reference" in last.metrics)
    assert last.metrics["scoring_s"] > 0
    again = list(steps_again(bus, config))
    assert [True] * 3 == [step.is_equal for step, _ in again]


@pytest.mark.parametrize(
    ("place", "changes", "told"),
    [
        ("trainer", {"trainer__loss__proximal": "sampled"}, "holds no weights but its own"),
        ("off", {"trainer__loss__proximal": "step_start"}, "nobody computes these log-probs"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, place: str, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=rf"logprob.place is '{place}'.*{told}"):
        config_of(tmp_path, place, **changes)
