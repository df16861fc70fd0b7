"""Writers' schemas of other releases, from the topic `schemas`, when a record needs one.

A newer release that joins a run publishes its schemas before it writes a record under them
(`publish_missing`), so a look-up that begins after a record was read finds its schema, or there is
none. Look-ups are bounded, for anybody can write ten bytes that name a schema: the topic is read
once, in the order in which it grows; a missing fingerprint is remembered, and makes us ask for the
topic's end at most every `RETRY_S`.
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

DEADLINE_S = 10.0  # longest wait for the topic's new records: a few, of a few kilobytes each
RETRY_S = 1.0
MAX_MISSING = 256  # fingerprints remembered as missing; others wait for RETRY_S as well


class Catalogue:
    """The port `schemas.SchemaTexts` on the topic `schemas` of a bus; belongs to its thread."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._texts: dict[bytes, str] = {}
        self._missing: set[bytes] = set()
        self._looked_s = float("-inf")
        self._next = 0  # offset in the topic's only partition

    def get(self, print_: bytes, /) -> str | None:
        """Return the schema text under a fingerprint; None: the topic does not hold it.

        Raises:
            DeadlineError: the topic did not deliver up to its end. The record is not at fault, and
                must not be set aside for this.
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
        """Read the topic's new records."""
        try:
            ends = self._bus.ends(SCHEMAS.name)
        except TopicMismatchError:  # a run, or a recording, without this topic
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
        """Keep a text under its own fingerprint, not the key's; pass by one that is no schema."""
        text = bytes(raw.value).decode("utf-8", "replace")
        if print_ := fingerprint_of_foreign(text):
            self._texts[print_] = text


def publish_missing(bus: Bus, writer: str, more: Collection[str] = ()) -> int:
    """Publish this release's schemas that the run does not have; return their number.

    Args:
        writer: a name that no other publisher has at the same time.
        more: texts of other releases, to be published beside ours.

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
