"""A restart may come at any moment: the fold and what is read again give the same plans."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlstreams.schemas.events import DroppedGroup, Event, PartitionPosition
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.record import Partition, Position
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.trainer.intake.admission import Admission, Plan
from rlstreams.workers.trainer.intake.groups import DeadSample, SeenSample
from tests import factories
from tests.unit.trainer.trainer_builders import dead, seen

SIZE = 2
NUM_GROUPS = 12
GROUPS = st.integers(0, NUM_GROUPS - 1)
AGES = st.integers(0, 2)
TOPICS = ("scored-trajectories", "dead-letters")


class Log:
    """Two topics of samples, and `steps`."""

    def __init__(self) -> None:
        self.samples: dict[str, list[SeenSample | DeadSample]] = {topic: [] for topic in TOPICS}
        self.steps: list[Event] = []

    def fold(self, num: int | None = None) -> Ledger:
        ledger = Ledger(keeps_steps=True)
        for offset, event in enumerate(self.steps[:num]):
            ledger.apply(event, Position("steps", 0, offset))
        return ledger


class Trainer:
    """One life of the planner: reads on from where the ledger says."""

    def __init__(self, log: Log, section: TrainerSection, ledger: Ledger) -> None:
        self.planner = Admission(section, ledger.closed)
        self.read = {Partition(topic, 0): 0 for topic in TOPICS}
        self.read |= {Partition(p.topic, p.partition): p.offset for p in ledger.positions}
        self._log = log

    def poll(self, num: int) -> None:
        for topic, records in self._log.samples.items():
            start = self.read[Partition(topic, 0)]
            for record in records[start : start + num]:
                if isinstance(record, SeenSample):
                    self.planner.add(record, 0.0)
                else:
                    self.planner.dead(record, 0.0)
                self.read[Partition(topic, 0)] += 1


class Restarts(RuleBasedStateMachine):
    """One trainer lives on, another is replaced at every restart: nobody can tell them apart."""

    @initialize(
        on_stale=st.sampled_from(["mask", "drop"]),
        min_group_samples=st.integers(0, 2),
        groups_per_step=st.integers(1, 2),
    )
    def begin(self, on_stale: str, min_group_samples: int, groups_per_step: int) -> None:
        self.section = TrainerSection(
            groups_per_step=groups_per_step,
            max_staleness=1,
            on_stale=on_stale,  # type: ignore[arg-type]
            min_group_samples=min_group_samples,
        )
        self.log = Log()
        self.log.steps.append(factories.trainer_started(epoch=1, policy_version=0))
        self.version, self.epoch = 0, 1
        self.lasting = Trainer(self.log, self.section, Ledger())
        self.mortal = Trainer(self.log, self.section, Ledger())
        self.trained: set[tuple[str, int]] = set()

    @rule(group=GROUPS, samples=st.permutations(range(SIZE)), num=st.integers(1, SIZE), age=AGES)
    def score(self, group: int, samples: list[int], num: int, age: int) -> None:
        records = self.log.samples[TOPICS[0]]
        version = max(0, self.version - age)
        for sample in samples[:num]:
            records.append(seen(group, sample, size=SIZE, versions=(version,), offset=len(records)))

    @rule(groups=st.permutations(range(NUM_GROUPS)))
    def score_many(self, groups: list[int]) -> None:
        """A step is not rare."""
        for group in groups[:3]:
            self.score(group, list(range(SIZE)), SIZE, 0)

    @rule(group=GROUPS, sample=st.integers(-1, SIZE - 1))
    def bury(self, group: int, sample: int) -> None:
        records = self.log.samples[TOPICS[1]]
        records.append(dead(group, sample, offset=len(records)))

    @rule(num=st.integers(1, 5))
    def poll(self, num: int) -> None:
        self.lasting.poll(num)
        self.mortal.poll(num)

    @rule()
    def restart(self) -> None:
        """Between two events; what it had read it reads again."""
        self.epoch += 1
        self.log.steps.append(factories.trainer_started(epoch=self.epoch))
        self.mortal = Trainer(self.log, self.section, self.log.fold())
        self.catch_up()

    @rule()
    def drop(self) -> None:
        """Whatever is due is dropped, in an event of its own."""
        drops = self.same_drops()
        if not drops:
            return
        ids = [group.group_id for group in drops]
        closed = self.mortal.planner.closed_after(ids)
        self.log.steps.append(
            factories.groups_dropped(epoch=self.epoch, groups=tuple(drops), closed=closed)
        )
        self.close(ids)

    @rule()
    def step(self) -> None:
        """The plan is trained and committed; a trainer that dies before has not planned."""
        plan = self.same_plan()
        if plan is None:
            return
        samples = {(p.seen.group_id, p.seen.sample) for p in plan.samples}
        assert not samples & self.trained
        self.trained |= samples
        low = self.mortal.planner.low_watermarks(self.mortal.read, plan.group_ids)
        self.version += 1
        self.log.steps.append(
            factories.step_completed(
                self.log.fold().last_step + 1,
                epoch=self.epoch,
                policy_version=self.version,
                closed=self.mortal.planner.closed_after(plan.group_ids),
                positions=tuple(
                    PartitionPosition(topic=p.topic, partition=p.number, offset=offset)
                    for p, offset in sorted(low.items())
                ),
            )
        )
        self.close(plan.group_ids)

    @precondition(lambda self: len(self.log.steps) > 1)
    @rule(share=st.floats(0, 1))
    def look_back(self, share: float) -> None:
        """What a shorter log said of a step, the longer one says still: redo plans only grow."""
        whole, part = self.log.fold(), self.log.fold(round(share * len(self.log.steps)))
        assert list(part.steps.values()) == list(whole.steps.values())[: part.last_step]

    @invariant()
    def closed_alike(self) -> None:
        if hasattr(self, "mortal"):
            assert self.lasting.planner.closed == self.mortal.planner.closed
            assert self.log.fold().closed in (self.mortal.planner.closed, Ledger().closed)

    def catch_up(self) -> None:
        """Both have read all that there is."""
        for trainer in (self.lasting, self.mortal):
            trainer.poll(max(map(len, self.log.samples.values())))

    def same_plan(self) -> Plan | None:
        self.catch_up()
        plan = self.lasting.planner.plan(self.version)
        assert plan == self.mortal.planner.plan(self.version)
        return plan

    def same_drops(self) -> list[DroppedGroup]:
        self.catch_up()
        drops = self.lasting.planner.drops(self.version, 0.0)
        assert drops == self.mortal.planner.drops(self.version, 0.0)
        return drops

    def close(self, group_ids: list[str] | tuple[str, ...]) -> None:
        self.lasting.planner.close(group_ids)
        self.mortal.planner.close(group_ids)


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
