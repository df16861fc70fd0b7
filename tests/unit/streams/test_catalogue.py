"""Schemas of other releases are found in the topic `schemas`; what is not there costs little."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from rlstreams.schemas import DecodeError, UnknownEventError, UnknownSchemaError, decode, encode
from rlstreams.schemas.avro import HISTORY, fingerprint, fingerprint_of_foreign, schema_text
from rlstreams.schemas.binary import MARKER
from rlstreams.schemas.events import EVENTS, Prompt, StepCompleted
from rlstreams.streams.log import catalogue as catalogue_module
from rlstreams.streams.log.catalogue import MAX_MISSING, Catalogue, publish_missing
from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.log.record import Outgoing, Partition
from rlstreams.streams.log.topics import SCHEMAS
from tests.factories import heartbeat, prompt
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.memory.consumer import MemoryReader
from tests.newer_release import newer_text, newer_value, publish, schema_record

PROMPT = fingerprint(newer_text("Prompt"))
UNKNOWN = b"12345678"


class CountingBus(MemoryBus):
    """Counts what a catalogue asks for."""

    num_ends = 0
    num_readers = 0

    def ends(self, topic: str) -> Mapping[Partition, int]:
        self.num_ends += 1
        return super().ends(topic)

    def reader(self, offsets: Mapping[Partition, int] | None = None) -> MemoryReader:
        self.num_readers += 1
        return super().reader(offsets)


@pytest.fixture
def bus() -> CountingBus:
    return CountingBus(made_log(), "run")


def test_nothing_is_read_before_somebody_asks_and_then_once(bus: CountingBus) -> None:
    """A run of one release never reads the topic; hundreds of newer records read it once."""
    publish(bus)
    schemas = bus.schemas()
    decode(b"".join(encode(prompt())), schemas)
    texts = [path.read_text() for path in HISTORY.glob("prompt.*.avsc")]
    older = next(text for text in texts if fingerprint(text) != fingerprint(schema_text("Prompt")))
    with pytest.raises(DecodeError, match="damaged"):
        decode(MARKER + fingerprint(older), schemas)
    assert (bus.num_ends, bus.num_readers) == (0, 0)
    for _ in range(300):
        decode(newer_value(prompt()), schemas)
        decode(newer_value(heartbeat()), schemas)
    assert (bus.num_ends, bus.num_readers) == (1, 1)


def test_an_unknown_fingerprint_asks_once_in_a_while(bus: CountingBus) -> None:
    """A stranger's records cost neither a request nor a read each."""
    publish(bus)
    began_s = time.monotonic()
    for _ in range(1000):
        with pytest.raises(UnknownSchemaError, match="3132333435363738 is unknown"):
            decode(MARKER + UNKNOWN + b"body", bus.schemas())
    assert bus.num_ends < 10 + (time.monotonic() - began_s)
    assert bus.num_readers == 1


def test_strangers_of_ever_new_fingerprints_are_bounded_too(
    bus: CountingBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten random bytes behind the marker make a new one each time."""
    monkeypatch.setattr(catalogue_module, "RETRY_S", 3600.0)
    catalogue = Catalogue(bus)
    for number in range(20 * MAX_MISSING):
        assert catalogue.get(number.to_bytes(8, "little")) is None
    assert bus.num_ends == MAX_MISSING
    assert bus.num_readers == 0  # the topic is empty


def test_what_was_missing_is_found_when_the_topic_grows(
    bus: CountingBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked for again after a while, or at once if somebody else's schema brought a look."""
    monkeypatch.setattr(catalogue_module, "RETRY_S", 0.0)
    catalogue = Catalogue(bus)
    assert catalogue.get(PROMPT) is None
    publish(bus, [Prompt])
    assert newer_text("Prompt") == catalogue.get(PROMPT)

    monkeypatch.setattr(catalogue_module, "RETRY_S", 3600.0)
    patient = Catalogue(bus)
    other = fingerprint(newer_text("StepCompleted"))
    assert patient.get(other) is None
    publish(bus, [StepCompleted])
    assert patient.get(other) is None
    assert patient.get(UNKNOWN) is None
    assert newer_text("StepCompleted") == patient.get(other)


def test_only_what_is_new_is_read(bus: CountingBus) -> None:
    publish(bus, [Prompt])
    catalogue = Catalogue(bus)
    assert catalogue.get(PROMPT)
    starts: list[Mapping[Partition, int]] = []
    bus.reader = lambda offsets=None: starts.append(offsets) or MemoryBus.reader(bus, offsets)  # type: ignore[method-assign, func-returns-value]
    end = bus.ends(SCHEMAS.name)[Partition(SCHEMAS.name, 0)]
    publish(bus, [StepCompleted])
    assert catalogue.get(fingerprint(newer_text("StepCompleted")))
    assert starts == [{Partition(SCHEMAS.name, 0): end}]


NO_SCHEMAS = {
    "not text": b"\xff\xfe\x00",
    "not json": b"{",
    "a number": b"1",
    "a list": b"[3]",
    "fields that are none": b'{"type": "record", "name": "rlstreams.Prompt", "fields": 3}',
    "nested too deep": b"[" * 100_000,
    "nothing": b"",
}


@pytest.mark.parametrize("kind", NO_SCHEMAS)
def test_what_is_no_schema_is_passed_by(bus: CountingBus, kind: str) -> None:
    """Anybody can write into the topic; the schemas behind it are found all the same."""
    junk = Outgoing(topic=SCHEMAS.name, key=PROMPT.hex().encode(), value=[NO_SCHEMAS[kind]])
    with bus.producer("stranger") as producer:
        producer.commit([junk])
    assert fingerprint_of_foreign(NO_SCHEMAS[kind].decode("utf-8", "replace")) is None
    publish(bus)
    assert prompt() == decode(newer_value(prompt()), bus.schemas())


def test_a_schema_counts_under_its_own_fingerprint(bus: CountingBus) -> None:
    """Not under the key that its writer gave it."""
    liar = Outgoing(
        topic=SCHEMAS.name, key=PROMPT.hex().encode(), value=[newer_text("StepCompleted").encode()]
    )
    with bus.producer("stranger") as producer:
        producer.commit([liar])
    assert bus.schemas().get(PROMPT) is None


MANY = b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"  # items of a block
RECORD = '{"type": "record", "name": "rlstreams.Prompt", "fields": [%s]}'
ITEMS = RECORD % '{"name": "more", "type": {"type": "array", "items": %s}}'
UNFIT = {
    "a field of another type": RECORD % '{"name": "group_id", "type": "long"}',
    "fields that ours has no default for": RECORD % "",
    "a type without end": RECORD % '{"name": "more", "type": "rlstreams.Prompt"}',
    "a type in itself": RECORD % '{"name": "more", "type": ["null", "rlstreams.Prompt"]}',
    "items without bytes": ITEMS % '"null"',
    "items of nothing": ITEMS % '{"type": "fixed", "name": "f", "size": 0}',
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_schema_that_ours_cannot_take_makes_an_unreadable_record(kind: str) -> None:
    """Not an error that ends the reader."""
    text = UNFIT[kind]
    with pytest.raises(DecodeError, match=fingerprint(text).hex()):
        decode(MARKER + fingerprint(text) + MANY + b"\x02" * 50, {fingerprint(text): text})


def test_an_event_of_which_we_know_nothing_is_told_apart() -> None:
    """A newer release may have events that this one has no use for."""
    text = '{"type": "record", "name": "rlstreams.Weather", "fields": []}'
    with pytest.raises(UnknownEventError, match="Weather"):
        decode(MARKER + fingerprint(text), {fingerprint(text): text})


def test_a_topic_that_does_not_deliver_is_named(
    bus: CountingBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than call the record a stranger's: nothing is known about it."""
    with bus.producer("newer") as producer:
        producer.commit([schema_record(newer_text("Prompt"))])

    class Silent(MemoryReader):
        def poll(self, max_records: int, timeout_s: float) -> list[object]:  # type: ignore[override]
            return []

    bus.reader = lambda offsets=None: Silent(bus._log, "run", offsets)  # type: ignore[method-assign]
    monkeypatch.setattr(catalogue_module, "DEADLINE_S", 0.01)
    with pytest.raises(DeadlineError, match=r"schemas\[0\]: at offset 0 of 2"):
        Catalogue(bus).get(PROMPT)


def test_a_worker_without_up_publishes_what_the_run_lacks(bus: CountingBus) -> None:
    """Of a newer release, joining a run that an older one began: once, whoever comes first."""
    assert len(EVENTS) == publish_missing(bus, "rollout-0")
    assert 0 == publish_missing(bus, "rollout-0")
    heir = MemoryBus(bus._log, "run")
    assert 0 == publish_missing(heir, "rollout-1")
    for event in EVENTS:
        text = schema_text(event.__name__)
        assert text == heir.schemas().get(fingerprint(text))
