"""Writers' schemas of other releases, from the topic `schemas`, when a record asks for one.

Who starts a newer release into a run publishes its schemas before it writes a record under them
(`publish_missing`), so a look that begins after a record was read finds its schema, or there is
none. Looks are bounded, for anybody can write ten bytes that name a schema: what the topic holds is
read once, in the order in which it grows; a fingerprint that is not there is remembered, and asks
again for the topic's end at most every `RETRY_S`.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from rlstreams.schemas.avro import fingerprint, fingerprint_of_foreign, schema_text
from rlstreams.schemas.events import EVENTS
from rlstreams.streams.log.errors import TopicMismatchError
from rlstreams.streams.log.read_to import read_to
from rlstreams.streams.log.record import Outgoing, RawRecord
from rlstreams.streams.log.topics import SCHEMAS

if TYPE_CHECKING:
    from rlstreams.streams.log.bus import Bus

DEADLINE_S = 10.0  # to read what the topic has grown by: a few records of a few kilobytes
RETRY_S = 1.0
MAX_MISSING = 256  # fingerprints that are remembered as missing; more only ask every RETRY_S


class Catalogue:
    """The port `schemas.SchemaTexts` on the topic `schemas` of a bus; belongs to its thread."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._texts: dict[bytes, str] = {}
        self._missing: set[bytes] = set()
        self._looked_s = float("-inf")
        self._next = 0  # offset in the topic's only partition

    def get(self, print_: bytes, /) -> str | None:
        """The schema text under a fingerprint; None: the topic does not hold it.

        Raises:
            DeadlineError: the topic did not deliver up to its end. That says nothing about the
                record: it must not be set aside for it.
            BrokerError: the broker cannot be reached, or refused.
        """
        if print_ not in self._texts and self._is_due(print_):
            self._look()
            if print_ not in self._texts and len(self._missing) < MAX_MISSING:
                self._missing.add(print_)
        return self._texts.get(print_)

    def _is_due(self, print_: bytes) -> bool:
        is_new = print_ not in self._missing and len(self._missing) < MAX_MISSING
        return is_new or time.monotonic() >= self._looked_s + RETRY_S

    def _look(self) -> None:
        """Read what the topic has grown by."""
        try:
            ends = self._bus.ends(SCHEMAS.name)
        except TopicMismatchError:  # of a run, or a recording, that never had one
            ends = {}
        self._looked_s = time.monotonic()
        for partition, end in ends.items():
            if self._next >= end:
                continue
            first = max(self._next, self._bus.beginnings(SCHEMAS.name)[partition])
            with self._bus.reader({partition: first}) as reader:
                for raws in read_to(reader, {partition: end}, DEADLINE_S):
                    for raw in raws:
                        self._learn(raw)
            self._next = end
            self._missing.clear()

    def _learn(self, raw: RawRecord) -> None:
        """By the text's own fingerprint, whatever the key says; what is no schema is passed by."""
        text = bytes(raw.value).decode("utf-8", "replace")
        if print_ := fingerprint_of_foreign(text):
            self._texts[print_] = text


def publish_missing(bus: Bus, writer: str, more: Collection[str] = ()) -> int:
    """Publish the schemas of this release that the run does not have; returns how many those were.

    Args:
        writer: nobody else who publishes at the same time has this name.
        more: texts of other releases, which are published beside ours.

    Raises:
        TopicMismatchError: the run has no such topic; nothing makes one here.
        StreamsError: the broker cannot be asked, or refused.
    """
    bus.partitions(SCHEMAS.name)
    texts = {fingerprint(t): t for t in (*more, *(schema_text(cls.__name__) for cls in EVENTS))}
    published = Catalogue(bus)
    missing = [
        Outgoing(topic=SCHEMAS.name, key=print_.hex().encode(), value=[text.encode()], partition=0)
        for print_, text in texts.items()
        if published.get(print_) is None
    ]
    if missing:
        with bus.producer(f"schemas-{writer}") as producer:
            producer.commit(missing)
    return len(missing)
