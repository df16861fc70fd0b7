"""A release that does not exist yet: its schemas have one field more, which this one never saw."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastavro import schemaless_writer

from rlstreams.schemas import decode
from rlstreams.schemas.avro import fingerprint, parsing_form, schema_text
from rlstreams.schemas.binary import MARKER
from rlstreams.schemas.events import EVENTS, Event
from rlstreams.streams.log.bus import Bus, Closing, GroupConsumer, Producer
from rlstreams.streams.log.record import Committed, Outgoing, Partition, Position
from rlstreams.streams.log.topics import SCHEMAS
from tests.plain_events import to_plain

FIELD = {"name": "mood", "type": "string", "default": "calm"}


def newer_text(name: str) -> str:
    """The schema of an event as that release has it."""
    schema = json.loads(schema_text(name))
    schema["fields"].append(FIELD)
    return json.dumps(schema)


def newer_value(event: Event) -> bytes:
    """A record's value as that release writes it."""
    text = newer_text(type(event).__name__)
    body = io.BytesIO()
    schemaless_writer(body, parsing_form(text), {**to_plain(event), "mood": "bright"})
    return MARKER + fingerprint(text) + body.getvalue()


def newer(record: Outgoing) -> Outgoing:
    """A record of ours as that release would have written it."""
    return replace(record, value=[newer_value(decode(b"".join(record.value)))])


def schema_record(text: str) -> Outgoing:
    """A schema as it is published."""
    key = fingerprint(text).hex().encode()
    return Outgoing(topic=SCHEMAS.name, key=key, value=[text.encode()], partition=0)


def publish(bus: Bus, kinds: Sequence[type[Event]] = EVENTS) -> None:
    """What that release does before it writes its first record."""
    with bus.producer("newer") as producer:
        producer.commit([schema_record(newer_text(kind.__name__)) for kind in kinds])


class NewerProducer(Closing):
    """A producer of that release."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def commit(
        self,
        records: Sequence[Outgoing],
        consumed: Mapping[Partition, Committed] | None = None,
        consumer: GroupConsumer | None = None,
    ) -> Sequence[Position]:
        return self._producer.commit([newer(record) for record in records], consumed, consumer)

    def close(self) -> None:
        self._producer.close()


def hand_over(pen: Any) -> Any:
    """A stand's producer, taken over by that release."""
    return NewerProducer(pen)
