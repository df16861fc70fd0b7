"""A branch: its trainer goes on from the parent's bits, and needs nothing else of the parent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlstreams.debug.branch.branch import Branched, BranchPlace, branch
from rlstreams.debug.rerun.rebuilt import RerunError, steps_again
from rlstreams.debug.rerun.rerun import rerun
from rlstreams.schemas.events import PolicyPublished, StepsRedone
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import SCORED, STEPS
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.context import Context
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.trainer.worker import TrainerWorker
from rlstreams.workers.weights.file import FileWeightServer
from tests.factories import heartbeat
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    scored,
    steps,
    tick_until,
    train,
)
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog

AT = Partition(SCORED.name, 0)


class Family:
    """A parent with three steps on a log in memory, and its branches, each on a log of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs: dict[str, MemoryLog] = {"demo": make_log()}
        config = make_config(folder / "demo", trainer__steps=5)
        trainer = make_trainer(self.logs["demo"], config)
        train(self.logs["demo"], trainer, 3)
        bury(trainer)

    def bus(self, run: str) -> Bus:
        return MemoryBus(self.logs[run], run)

    def branch(self, name: str, step: int, *settings: str, of: str = "demo") -> Branched:
        parent = self.folder / of
        place = BranchPlace(
            parent=str(parent),
            checkpoints=[parent / "checkpoints"],
            run_id=name,
            folder=str(self.folder / name),
        )
        return branch(self.bus(of), place, step, settings, topics=self._topics)

    @contextmanager
    def _topics(self, config: RunConfig) -> Iterator[Bus]:
        self.logs[config.run.id] = made_log(config.run.id)
        yield self.bus(config.run.id)

    def trainer(self, made: Branched, instance: str) -> TrainerWorker:
        config, bus = made.config, self.bus(made.config.run.id)
        context = Context(
            config=config, bus=bus, role="trainer", ordinal=0, instance=instance, takeover=True
        )
        training = Training(Path(config.model.path), config.trainer, threads=1)
        server = FileWeightServer(context.folder / "weights", 4)
        return TrainerWorker(context, bus, training, server)

    def feed(self, made: Branched, group: int, version: int) -> None:
        records = [outgoing(SCORED, scored(group, sample, version)) for sample in range(2)]
        self.bus(made.config.run.id).producer("logprob.0").commit(records)

    def told(self, run: str, topic: str) -> list[object]:
        bus = self.bus(run)
        reader = bus.reader(bus.beginnings(topic))
        return [decoded(raw).event for raw in reader.poll(10_000, 0.0)]

    def steps(self, run: str) -> dict[int, tuple[str, str]]:
        """Hash before and hash behind, by step."""
        found = (e for e in self.told(run, STEPS.name) if type(e).__name__ == "StepCompleted")
        return {e.step: (e.previous_hash, e.weight_hash) for e in found}  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("family"))


def test_it_goes_on_from_the_parents_bits_and_makes_the_parents_step(family: Family) -> None:
    """Of the same samples under the same settings bit for bit, and after a kill; its own steps are
    done again from its own log; a branch of it begins where it stands."""
    parent = {event.step: event for event in steps(family.logs["demo"])}
    made = family.branch("child", 2)
    assert (2, parent[2].weight_hash) == (made.num_redone, made.event.weight_hash)
    first = family.trainer(made, "one")
    published = lambda: family.told("child", "policy-versions")  # noqa: E731
    tick_until(first, lambda: bool(published()))
    base = published()[0]
    assert isinstance(base, PolicyPublished)
    assert (2, 2, parent[2].weight_hash) == (base.policy_version, base.step, base.weight_hash)
    family.feed(made, 2, 2)  # as the parent's third step had them
    tick_until(first, lambda: 3 in family.steps("child"))
    assert (parent[2].weight_hash, parent[3].weight_hash) == family.steps("child")[3]
    family.feed(made, 3, 3)
    tick_until(first, lambda: 4 in family.steps("child"))
    bury(first)

    second = family.trainer(made, "two")  # killed: from the base, which is its only checkpoint
    tick_until(second, lambda: bool(redone(family)))
    assert [(3, 4, 2)] == redone(family)
    family.feed(made, 4, 4)
    tick_until(second, lambda: second.done)
    second.close()
    assert [3, 4, 5] == sorted(family.steps("child"))

    checkpoints = [family.folder / "child/checkpoints"]
    found = rerun(family.bus("child"), made.config, 4, checkpoints=checkpoints)
    assert found.is_equal
    again = steps_again(family.bus("child"), made.config, checkpoints=checkpoints[:1])
    assert [(3, []), (4, []), (5, [])] == [(step.fact.step, differs) for step, differs in again]
    told = rf"step 2 is not of run 'child'.*replay step 2 {family.folder / 'demo'}"
    with pytest.raises(RerunError, match=told):
        rerun(family.bus("child"), made.config, 2, checkpoints=checkpoints)
    with pytest.raises(RerunError, match="step 2 is not of run 'child', but of its parent"):
        family.branch("x", 2, of="child")

    third = family.branch("third", 4, "trainer.optimizer.lr=1e-5", of="child")
    assert family.steps("child")[4][1] == third.event.weight_hash
    assert "trainer.optimizer.lr 1e-05 (was " in third.lines()[0]
    heir = family.trainer(third, "three")
    family.feed(third, 4, 4)
    tick_until(heir, lambda: 5 in family.steps("third"))
    assert family.steps("child")[5][0] == family.steps("third")[5][0]
    assert family.steps("child")[5][1] != family.steps("third")[5][1]
    heir.close()


def redone(family: Family) -> list[tuple[int, int, int]]:
    found = (e for e in family.told("child", STEPS.name) if isinstance(e, StepsRedone))
    return [(e.first_step, e.last_step, e.num_equal) for e in found]


def test_a_branch_without_its_base_does_not_begin_anew(family: Family) -> None:
    """Neither from the model folder, nor, where `steps` does not say that it is one, at step 1."""
    made = family.branch("damaged", 3)
    base = family.folder / "damaged/checkpoints/000000-00000003"
    whole = (base / "optimizer.safetensors").read_bytes()
    (base / "optimizer.safetensors").write_bytes(whole[:-1])
    trainer = family.trainer(made, "one")
    told = r"is a branch of 'demo' at step 3, and no .*optimizer.safetensors has hash"
    with pytest.raises(ConfigError, match=told):
        tick_until(trainer, lambda: False)
    trainer.close()
    (base / "optimizer.safetensors").write_bytes(whole)
    family.logs["damaged"] = made_log("damaged")
    with pytest.raises(ConfigError, match="checkpoint 000000-00000003 in its folder is what a br"):
        family.trainer(made, "two")


@pytest.mark.parametrize(
    ("step", "settings", "told"),
    [
        (4, (), "step 4 was never completed: the log holds steps 1 to 3"),
        (2, ("run.seed=7",), "cannot go on from step 2 of 'demo': run.seed was 0 and is 7"),
        (2, ("prompts.group_size=4",), "prompts.group_size was 2 and is 4"),
        (2, ("model.dtype=bfloat16",), "model.dtype was float32 and is bfloat16"),
        (2, ("run.id=x",), "--set run.id: name it with --as NAME"),
        (2, ("trainer.steps",), "--set takes NAME=VALUE, got 'trainer.steps'"),
        (3, ("trainer.steps=3",), "no step to make: --set trainer.steps=N, with N above 3"),
        (2, ("trainer.optimizer.lrr=1",), "trainer.optimizer.lrr"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_left(
    family: Family, step: int, settings: tuple[str, ...], told: str
) -> None:
    """Each with the field and the value."""
    with pytest.raises(ConfigError, match=told):
        family.branch("never", step, *settings)
    assert not (family.folder / "never").exists()
    assert "never" not in family.logs


def test_what_retention_took_is_named_with_the_steps_that_have_a_checkpoint(
    family: Family, tmp_path: Path
) -> None:
    """At such a step nothing has to be done again, so nothing of it is needed."""
    parent = family.branch("parent", 1, "trainer.steps=3", "trainer.checkpoint_every=2")
    trainer = family.trainer(parent, "one")
    for version in (1, 2):
        family.feed(parent, version, version)
        tick_until(trainer, lambda: version + 1 in family.steps("parent"))  # noqa: B023
    tick_until(trainer, lambda: trainer.done)
    trainer.close()
    shutil.rmtree(family.folder / "parent/checkpoints/000001-00000003")
    log = family.logs["parent"]
    log.trim(Partition(f"parent.{SCORED.name}", 0), family.bus("parent").ends(SCORED.name)[AT])
    told = r"behind step 3 cannot be reached: step 3 cannot be .* nothing has .* again: 2$"
    with pytest.raises(RerunError, match=told):
        family.branch("late", 3, "trainer.steps=5", of="parent")
    made = family.branch("early", 2, "trainer.steps=5", of="parent")
    assert (0, "checkpoint 000001-00000002 of step 2") == (made.num_redone, made.started_from)
    model = tmp_path / "model"
    shutil.copytree(parent.config.model.path, model)
    with (model / "tokenizer.json").open("a") as file:
        file.write(" ")
    told = "cannot go on from step 2 of 'parent': hash of the tokenizer was"
    with pytest.raises(ConfigError, match=told):
        family.branch("x", 2, "trainer.steps=5", f"model.path={model}", of="parent")


def test_a_name_in_use_and_a_void_step_are_refused(family: Family) -> None:
    """A step that its trainer disowns has no weights."""
    family.branch("used", 3)
    with pytest.raises(ConfigError, match=r"run.id 'used' is in use: .* --as NAME"):
        family.branch("used", 3)
    log = make_log()
    trainer = make_trainer(log, make_config(family.folder / "void"))
    train(log, trainer, 2)
    bury(trainer)
    bus = MemoryBus(log, "demo")
    at = bus.reader(bus.beginnings(STEPS.name)).poll(1000, 0.0)
    (offset,) = (r.position.offset for r in at if getattr(decoded(r).event, "step", 0) == 2)
    beat = heartbeat(run="demo", epoch=1, disowned=(offset,))
    bus.producer("x").commit([outgoing(STEPS, beat)])
    place = BranchPlace(parent="p", checkpoints=[], run_id="v", folder=str(family.folder / "v"))
    with pytest.raises(RerunError, match=r"step 2 is void: .*branch at step 1"):
        branch(bus, place, 2, ())
