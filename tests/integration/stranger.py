"""Somebody without our code: reads and writes a run by its documents, with other libraries alone.

Written from `rlstreams/schemas/README.md`, the `.avsc` files and the text at the top of
`rlstreams/streams/log/done_set.py`. It must import none of our packages; a test looks.
"""

from __future__ import annotations

import base64
import io
import json
import time
from pathlib import Path

import numpy as np
import zstandard
from fastavro import parse_schema, schemaless_reader, schemaless_writer
from fastavro.schema import fingerprint, to_parsing_canonical_form
from kafka import KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition

DEADLINE_S = 120.0
MARKER = b"\xc3\x01"


def schemas_from_folder(folder):
    """Schemas of all `.avsc` files directly in `folder`, by fingerprint."""
    return _by_fingerprint(path.read_text() for path in Path(folder).glob("*.avsc"))


def schemas_from_topic(bootstrap, topic):
    """Schemas that the run published, by fingerprint; the keys must say the same."""
    found = read(bootstrap, topic)
    schemas = _by_fingerprint(record.value.decode() for record in found)
    assert {print_.hex() for print_ in schemas} == {record.key.decode() for record in found}
    return schemas


def read(bootstrap, topic, **login):
    """All committed messages of a topic, partition by partition, as kafka-python gives them.

    Args:
        login: of kafka-python, for a broker with a password.
    """
    settings = {"isolation_level": "read_committed", **login}
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, **settings)
    partitions = [TopicPartition(topic, n) for n in sorted(consumer.partitions_for_topic(topic))]
    consumer.assign(partitions)
    consumer.seek_to_beginning()
    ends = consumer.end_offsets(partitions)
    found = {partition: [] for partition in partitions}
    deadline = time.monotonic() + DEADLINE_S
    while any(consumer.position(p) < end for p, end in ends.items()):
        assert time.monotonic() < deadline, f"{topic} did not deliver up to {ends}"
        for partition, messages in consumer.poll(timeout_ms=100).items():
            found[partition] += messages
    consumer.close()
    return [message for messages in found.values() for message in messages]


def whole_values(messages):
    """First message, value and offsets of each record, its parts joined by their header."""
    begun = {}
    for message in messages:
        headers = dict(message.headers)
        if "rlstreams-part" not in headers:
            yield message, message.value, [message.offset]
            continue
        index, count = map(int, headers["rlstreams-part"].split(b"/"))
        parts = begun.setdefault((message.partition, headers["rlstreams-record"]), [])
        assert index == len(parts), "parts come in order"
        parts.append(message)
        if len(parts) == count:
            yield parts[0], b"".join(m.value for m in parts), [m.offset for m in parts]


def event(value, schemas):
    """Name and fields of an event."""
    assert value[:2] == MARKER
    schema = schemas[value[2:10]]
    return schema["name"].removeprefix("rlstreams."), schemaless_reader(
        io.BytesIO(value[10:]), schema
    )


def event_bytes(name, fields, schemas):
    """The value of a record."""
    (print_,) = [p for p, schema in schemas.items() if schema["name"] == f"rlstreams.{name}"]
    body = io.BytesIO()
    schemaless_writer(body, schemas[print_], fields)
    return MARKER + print_ + body.getvalue()


def write(bootstrap, topic, key, value, headers=()):
    """One record outside of any transaction; where it lies, as (partition, offset)."""
    (place,) = write_all(bootstrap, [(topic, key, value, headers)])
    return place


def write_all(bootstrap, records):
    """Records outside of any transaction; where they lie, as (partition, offset)."""
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all")
    sent = [producer.send(t, value, key, headers=list(more)) for t, key, value, more in records]
    found = [future.get(timeout=DEADLINE_S) for future in sent]
    producer.close()
    return [(place.partition, place.offset) for place in found]


def array(tensor):
    """A tensor as numpy."""
    data = tensor["data"]
    if tensor["codec"] == "zstd":
        data = zstandard.ZstdDecompressor().decompress(data)
    return np.frombuffer(data, np.dtype(tensor["dtype"]).newbyteorder("<")).reshape(tensor["shape"])


def commits(bootstrap, group, topic, **login):
    """A group's offset and metadata by partition, the metadata exactly as the broker keeps it."""
    settings = {"group_id": group, "enable_auto_commit": False, **login}
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, **settings)
    numbers = sorted(consumer.partitions_for_topic(topic))
    found = {n: consumer.committed(TopicPartition(topic, n), metadata=True) for n in numbers}
    consumer.close(autocommit=False)
    return {n: (at.offset, at.metadata) for n, at in found.items() if at is not None}


def done_set(low, metadata):
    """The offsets that the metadata of a commit at `low` names as done."""
    text = metadata.rstrip("\0").split(" ")[0]
    if not text:
        return set()
    assert text[0] == "b"
    data = base64.b85decode(text[1:])
    return {low + i for i in range(8 * len(data)) if data[i // 8] >> i % 8 & 1}


def _by_fingerprint(texts):
    schemas = {}
    for text in texts:
        schema = json.loads(text)
        print_ = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
        schemas[bytes.fromhex(print_)] = parse_schema(schema)
    return schemas


def commit(bootstrap, group, topic, offset, metadata):
    """Commit a position of partition 0, as any client may."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False)
    at = TopicPartition(topic, 0)
    consumer.assign([at])
    consumer.commit({at: OffsetAndMetadata(offset, metadata, -1)})
    consumer.close()
