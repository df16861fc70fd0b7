"""A short run by hand in which each fate of a sample happens once; on a bus, or as a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlstreams.schemas.events import AbsentSample, Event, Tensor
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing, Partition
from rlstreams.streams.log.topics import PROMPTS, TOPICS, TRAJECTORIES
from rlstreams.streams.recording import RecordedTopic, RecordingManifest, RecordingWriter
from rlstreams.streams.run.run_log import BusLog, topic_of
from tests import factories as f
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog

RUN = "told"
PARTITIONS = 2
WORDS = ("<bos>", "2", "+", "3", "=", "5", "6", "<eos>", " ", "\n", "é", "<b>")
BEHAVIOR = (-0.5, -0.25, -1.0)
PROXIMAL = (-0.5, -0.375, -0.5)  # differences 0, -0.125, +0.5
TOKENS = 3  # that each policy segment has
UNREADABLE = b"\xc3\x01 not an event"


def decode(token_ids: Sequence[int]) -> str:
    return "".join(WORDS[int(token) % len(WORDS)] for token in token_ids)


def floats(values: Sequence[float]) -> Tensor:
    return Tensor.of(np.array(values, np.float32))


def policy(version: int, **changes: object) -> object:
    return f.policy_segment(
        TOKENS, version, token_ids=f.int32s(TOKENS, 5), behavior_logprobs=floats(BEHAVIOR),
        load_id=f"rollout-0/{version}", **changes,
    )  # fmt: skip


def rollout(group_id: str, sample: int, *versions: int, **changes: object) -> list[Event]:
    """The prompt and its trajectory, a segment under each version."""
    same = {"group_id": group_id, "sample": sample, "group_size": 2}
    reward = float(changes.pop("reward", 1.0))
    purpose = str(changes.pop("purpose", "train"))
    segments = (f.prompt_segment(5), *(policy(version) for version in versions))
    return [
        f.prompt(**same, purpose=purpose, token_ids=f.int32s(5), issued_at_ms=f.NOW_MS, **changes),
        f.trajectory(
            **same, purpose=purpose, segments=segments, reward=reward,
            started_at_ms=f.NOW_MS + 1000, finished_at_ms=f.NOW_MS + 1250,
        ),
    ]  # fmt: skip


def scored(group_id: str, sample: int, *versions: int, **changes: object) -> list[Event]:
    """The same, and its scores."""
    prompt, trajectory = rollout(group_id, sample, *versions, **changes)
    scores = tuple(
        f.score(
            TOKENS, version, segment=number, proximal_logprobs=floats(PROXIMAL),
            load_id=f"logprob-0/{version}",
        )
        for number, version in enumerate(versions, 1)
    )  # fmt: skip
    return [
        prompt,
        trajectory,
        f.scored(trajectory, scores=scores, scored_at_ms=f.NOW_MS + 1500),
    ]


def loads(version: int) -> list[Event]:
    """A version is published and loaded by two workers."""
    at_ms = f.NOW_MS + 2200 * version
    return [
        f.policy_published(version, published_at_ms=at_ms),
        *(
            f.policy_loaded(
                version, worker=worker, role=worker[:-2], load_id=f"{worker}/{version}",
                loaded_at_ms=at_ms + 50,
            )
            for worker in ("rollout-0", "logprob-0")
        ),
    ]  # fmt: skip


def step(number: int, *samples: tuple[str, int, int], **changes: object) -> Event:
    """A step over (group, sample, oldest version)."""
    refs = tuple(
        f.sample_ref(group, sample, oldest_policy_version=oldest, reward=1.0 - sample)
        for group, sample, oldest in samples
    )
    return f.step_completed(
        number, samples=refs, micro_batches=(len(refs),), masked=(),
        **{
            "absent": (), "started_at_ms": f.NOW_MS + 1700, "finished_at_ms": f.NOW_MS + 2000,
            **changes,
        },
    )  # type: ignore[arg-type]  # fmt: skip


def events() -> list[Event]:
    """In the order of the log; a copy of 1/0 and a step of a dethroned trainer among them."""
    return [
        f.trainer_started(epoch=1),
        *loads(0),
        *scored("0", 0, 0),
        *scored("0", 1, 0, reward=0.0),
        step(1, ("0", 0, 0), ("0", 1, 0)),
        *loads(1),
        *scored("1", 0, 0, 1),  # went on under newer weights
        rollout("1", 0, 1)[1],  # a copy that nobody uses
        *rollout("1", 1, 1),
        step(2, ("1", 0, 0), absent=(AbsentSample(group_id="1", sample=1, reason="reward"),)),
        *loads(2),
        *scored("2", 0, 0, reward=0.5),
        f.groups_dropped(groups=(f.dropped_group("2"),), dropped_at_ms=f.NOW_MS + 4000),
        f.prompt(group_id="3", sample=0, group_size=2, replaces="2", replacement=1),
        f.dead_letter(group_id="4", sample=0),
        *scored("4", 1, 2),
        *rollout("e1-7", 0, 1, purpose="evaluate"),
        f.trainer_started(epoch=2),
        step(3, ("4", 1, 2), epoch=1),
    ]


def publish(bus: Bus, wanted: Sequence[Event]) -> None:
    """All in one transaction, and at its end one trajectory that cannot be read."""
    sent = []
    for event in wanted:
        topic = topic_of(type(event))
        # Prompts are not dealt out by key: by the group's number, as their role does.
        partition = int(event.group_id[-1]) % 2 if topic is PROMPTS else None  # type: ignore[union-attr]
        sent.append(outgoing(topic, event, partition=partition))
    unreadable = Outgoing(topic=TRAJECTORIES.name, key=b"1", value=[UNREADABLE])
    with bus.producer("teller") as producer:
        producer.commit([*sent, unreadable])


def create(make: Callable[[str, int], None]) -> None:
    """Every topic of a run."""
    for topic in TOPICS:
        make(topic.name, 1 if topic.single_partition else PARTITIONS)


def memory_bus(wanted: Sequence[Event] | None = None) -> MemoryBus:
    """The run in memory."""
    log = MemoryLog()
    create(lambda name, partitions: log.create(f"{RUN}.{name}", partitions))
    bus = MemoryBus(log, RUN)
    publish(bus, events() if wanted is None else wanted)
    return bus


def bus_log(wanted: Sequence[Event] | None = None) -> BusLog:
    """The same, to be read."""
    return BusLog(memory_bus(wanted), RUN)


def recorded(folder: Path, bus: Bus, config: str = "") -> Path:
    """A bus's run as a recording, with its configuration as JSON."""
    topics = {
        topic.name: RecordedTopic(id=topic.name, partitions=bus.partitions(topic.name))
        for topic in TOPICS
    }
    manifest = RecordingManifest(run=RUN, started_at_ms=f.NOW_MS, config=config, topics=topics)
    with RecordingWriter(folder, manifest) as writer:
        ends: dict[Partition, int] = {}
        for topic in TOPICS:
            for raw in BusLog(bus, RUN).records(topic):
                writer.append(raw)
            ends.update(bus.ends(topic.name))
        writer.commit(ends, dict.fromkeys(ends, 0))
        writer.seal()
    return folder
