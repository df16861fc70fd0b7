"""A stand for the role `prompts` alone: topics, files, and what the trainer would say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlstreams.schemas.events import EVALUATE, TRAIN, ClosedGroups, Event, Prompt
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.topics import PROMPTS, STEPS, TOPICS, Topic
from rlstreams.workers.config.data import DataSection
from rlstreams.workers.config.run import ModelSection, PromptsSection, RunConfig
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.loop.context import Context
from rlstreams.workers.prompts.worker import PromptsWorker
from tests.factories import step_completed, trainer_started
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog
from tests.unit.problems.rows import Characters

PARTITIONS = 3
ROWS = 10


class World:
    """A run's topics and files, and its `prompts` workers."""

    def __init__(self, folder: Path, **prompts: Any) -> None:
        self.folder = folder
        self.log = MemoryLog()
        for topic in TOPICS:
            self.log.create(f"run.{topic.name}", PARTITIONS if topic == PROMPTS else 1)
        self.bus = MemoryBus(self.log, "run")
        self.trainer = self.bus.producer("test")
        (folder / "config.json").write_text(
            json.dumps(
                {"model_type": "qwen2", "architectures": ["Q"], "max_position_embeddings": 20}
            )
        )
        for name, rows in (("train", ROWS), ("held_out", 4)):
            lines = [json.dumps({"prompt": f"{name} {i}", "answer": str(i)}) for i in range(rows)]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
        self.config = RunConfig(
            data=DataSection(
                train=str(folder / "train.jsonl"), held_out=str(folder / "held_out.jsonl")
            ),
            model=ModelSection(path=str(folder)),
            prompts=PromptsSection(**{"group_size": 2, "evaluate_rows": 3, **prompts}),
            trainer=TrainerSection(steps=4, groups_per_step=3, max_staleness=1),
        )

    def worker(self) -> PromptsWorker:
        context = Context(config=self.config, bus=self.bus, role="prompts", ordinal=0, instance="p")
        return PromptsWorker(context, Characters(), poll_s=0.001)

    def issuing(self, **claim: Any) -> PromptsWorker:
        """A worker that has issued what a claim lets it."""
        self.says(started(**claim))
        worker = self.worker()
        ticks(worker)
        return worker

    def says(self, *events: Event, topic: Topic = STEPS) -> None:
        self.trainer.commit([outgoing(topic, event) for event in events])

    def issued(self) -> Sequence[tuple[int, Prompt]]:
        """Partition and event of every record of `prompts`."""
        found = []
        with self.bus.reader(self.bus.beginnings(PROMPTS.name)) as reader:
            while records := reader.poll(100, 0.0):
                found += [(raw.position.partition, decoded(raw).event) for raw in records]
        return [(at, event) for at, event in found if isinstance(event, Prompt)]

    def groups(self) -> dict[str, list[Prompt]]:
        """Training samples by group."""
        groups: dict[str, list[Prompt]] = {}
        for _, prompt in self.issued():
            if prompt.purpose == TRAIN:
                groups.setdefault(prompt.group_id, []).append(prompt)
        return groups

    def evaluations(self) -> list[str]:
        """Ids of evaluation samples, in order."""
        return sorted(p.group_id for _, p in self.issued() if p.purpose == EVALUATE)


def ticks(worker: PromptsWorker, count: int = 3) -> None:
    for _ in range(count):
        worker.tick()


def started(**changes: Any) -> Event:
    return trainer_started(**{"step_target": 4, **changes})


def step(number: int, watermark: int, **changes: Any) -> Event:
    closed = ClosedGroups(watermark=watermark)
    return step_completed(number, **{"closed": closed, **changes})


def until(worker: PromptsWorker, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s
        worker.tick()
