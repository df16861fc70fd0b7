"""A run is open: others read it, and write into it, by its documents and with their own clients."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import numpy as np
import pytest

from rlstreams.schemas.avro import FOLDER
from rlstreams.schemas.events import EVENTS, Event, Prompt, Trajectory
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.done_set import covered, encode_done
from rlstreams.streams.log.record import Committed, Outgoing, Partition
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import PROMPTS, SCHEMAS, TOPICS, TRAJECTORIES, Topic
from tests import factories
from tests.integration import stranger
from tests.plain_events import to_plain

PLAN = TopicPlan(rollout_workers=2, logprob_workers=1)
SEED = 4
MAX_ROUNDS = 20


@pytest.fixture
def bus(broker: str, run_id: str) -> KafkaBus:
    """Of a run with all its topics."""
    apply(broker, run_id, PLAN)
    return KafkaBus(broker, run_id)


def topic_of(event: Event) -> Topic:
    return next(topic for topic in TOPICS if isinstance(event, topic.events))


def large_trajectory(sample: int) -> Trajectory:
    """3 MB that no codec makes smaller."""
    experts = np.random.default_rng(SEED + sample).permuted(
        np.tile(np.arange(128, dtype=np.uint8), (3_000, 8, 1)), axis=-1
    )
    return factories.trajectory(
        sample=sample, routed_experts=factories.Tensor.of(experts.reshape(-1, 8, 128))
    )


def test_the_stranger_knows_none_of_our_packages() -> None:
    tree = ast.parse(Path(stranger.__file__).read_text("utf-8"))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else _names(node))
        if name
    }
    assert {"schemas", "streams", "workers", "tests"}.isdisjoint(imported)
    assert {"fastavro", "kafka"} <= imported


def test_every_kind_of_event_is_read(broker: str, run_id: str, bus: KafkaBus) -> None:
    """Name, key and every field, with the schemas that the run published: once, the files'."""
    events = factories.one_of_each()
    records = [outgoing(topic_of(event), event) for event in events.values()]
    with bus.producer("writer") as producer:
        producer.commit(records)

    apply(broker, run_id, PLAN)
    (end,) = bus.ends(SCHEMAS.name).values()
    assert len(EVENTS) + 1 == end  # and the marker of the transaction
    schemas = stranger.schemas_from_topic(broker, f"{run_id}.{SCHEMAS.name}")
    assert stranger.schemas_from_folder(FOLDER) == schemas
    found = {}
    for name in {record.topic for record in records}:
        for first, value, _ in stranger.whole_values(stranger.read(broker, f"{run_id}.{name}")):
            kind, fields = stranger.event(value, schemas)
            found[kind] = (first.key, fields)
    expected = {
        name: (record.key, to_plain(event))
        for (name, event), record in zip(events.items(), records, strict=True)
    }
    assert expected == found


def test_tensors_are_plain_arrays(broker: str, run_id: str, bus: KafkaBus) -> None:
    """Raw and compressed, with dtype and shape."""
    written = factories.with_experts(codec="zstd")
    with bus.producer("writer") as producer:
        producer.commit([outgoing(TRAJECTORIES, written)])

    (record,) = stranger.whole_values(stranger.read(broker, f"{run_id}.trajectories"))
    _, fields = stranger.event(record[1], stranger.schemas_from_folder(FOLDER))
    assert written.routed_experts is not None
    for tensor, field in (
        (written.routed_experts, fields["routed_experts"]),
        (written.segments[1].token_ids, fields["segments"][1]["token_ids"]),
        (written.segments[1].behavior_logprobs, fields["segments"][1]["behavior_logprobs"]),
    ):
        np.testing.assert_array_equal(tensor.numpy(), stranger.array(field), strict=True)


def test_parts_that_lie_between_others_are_joined(broker: str, run_id: str, bus: KafkaBus) -> None:
    """Two workers write 3 MB under one key at one time; what is joined is what was written."""
    written = [large_trajectory(sample) for sample in range(2)]
    topic = f"{run_id}.trajectories"
    for _ in range(MAX_ROUNDS):
        _write_at_once(bus, [outgoing(TRAJECTORIES, t) for t in written])
        found = list(stranger.whole_values(stranger.read(broker, topic)))
        if any(offsets[-1] - offsets[0] >= len(offsets) for _, _, offsets in found):
            break
    else:
        pytest.fail(f"in {MAX_ROUNDS} rounds no part came to lie between those of another record")

    schemas = stranger.schemas_from_folder(FOLDER)
    plain = {t.sample: to_plain(t) for t in written}
    assert {4} == {len(offsets) for _, _, offsets in found}
    for _, value, _ in found:
        _, fields = stranger.event(value, schemas)
        assert plain[fields["sample"]] == fields


def test_a_commit_that_is_out_of_order_is_understood(
    broker: str, run_id: str, bus: KafkaBus
) -> None:
    sets = [
        {1000 + i for i in (1, 3, 5)},
        set(range(2500, 3500)) | set(range(4000, 9000)),
        {1000 + i for i in range(8000) if i % 3},
        {1000},
    ]
    done = {Partition(PROMPTS.name, n): offsets for n, offsets in enumerate(sets)}
    positions = {
        p: Committed(offset=1000, metadata=encode_done(1000, offsets, 2))
        for p, offsets in done.items()
    }
    with bus.consumer("rollout", [PROMPTS.name]) as consumer, bus.producer("writer") as producer:
        while len(consumer.positions()) < len(done):
            consumer.poll(0, 1.0)
        producer.commit([], positions, consumer)

    found = stranger.commits(broker, f"{run_id}.rollout", f"{run_id}.prompts")
    for partition, expected in done.items():
        low, metadata = found[partition.number]
        assert (1000, " tries 2\0") == (low, metadata[-9:])
        assert expected == stranger.done_set(low, metadata)


def test_what_a_stranger_writes_is_read(broker: str, run_id: str, bus: KafkaBus) -> None:
    """An event written with fastavro, without a transaction, is one of ours."""
    expected = factories.prompt(text="written elsewhere")
    schemas = stranger.schemas_from_topic(broker, f"{run_id}.{SCHEMAS.name}")
    value = stranger.event_bytes("Prompt", to_plain(expected), schemas)
    headers = [("rlstreams-id", b"7/1/0"), ("rlstreams-purpose", b"train")]
    partition, offset = stranger.write(broker, f"{run_id}.prompts", b"7", value, headers)

    with bus.reader({Partition(PROMPTS.name, partition): offset}) as reader:
        (raw,) = reader.poll(10, stranger.DEADLINE_S)
    event = decoded(raw).event
    assert isinstance(event, Prompt)
    assert to_plain(expected) == to_plain(event)
    ours = outgoing(PROMPTS, expected)
    assert (ours.key, dict(ours.headers)) == (raw.key, dict(raw.headers))


def test_both_clients_choose_the_same_partition(broker: str, run_id: str, bus: KafkaBus) -> None:
    keys = [f"{group_id}" for group_id in range(8)]
    with bus.producer("writer") as producer:
        ours = producer.commit(
            [outgoing(TRAJECTORIES, factories.trajectory(group_id=key)) for key in keys]
        )
    topic = f"{run_id}.trajectories"
    theirs = [stranger.write(broker, topic, key.encode(), b"")[0] for key in keys]
    assert [position.partition for position in ours] == theirs
    assert {0, 1} == set(theirs)


def _write_at_once(bus: KafkaBus, records: list[Outgoing]) -> None:
    """Each record in a transaction of its own writer, all at the same time."""
    producers = [bus.producer(f"writer.{n}") for n in range(len(records))]
    start = threading.Barrier(len(records))

    def work(n: int) -> None:
        start.wait(stranger.DEADLINE_S)
        producers[n].commit([records[n]])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(records))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(stranger.DEADLINE_S)
        assert not thread.is_alive(), "a commit hangs"
    for producer in producers:
        producer.close()


def _names(node: ast.Import) -> list[str]:
    return [alias.name for alias in node.names]


def test_metadata_of_another_client_is_no_done_set(broker: str, bus: KafkaBus, run_id: str) -> None:
    """Any text, without the NUL that ours ends in: the offset counts, and nothing above it."""
    partition = Partition(PROMPTS.name, 0)
    texts = ["x" * length for length in range(1, 30)]
    found = []
    for text in texts:
        stranger.commit(broker, f"{run_id}.rollout", f"{run_id}.{PROMPTS.name}", 5, text)
        found.append(bus.committed("rollout", PROMPTS.name)[partition])
    assert {5} == {committed.offset for committed in found}
    assert not any(covered(committed, 5) for committed in found)
