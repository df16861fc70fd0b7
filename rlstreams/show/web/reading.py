"""A run's log on its way into the page: one thread reads it, and notes where samples lie."""

from __future__ import annotations

import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from rlstreams.debug.inspect.words import Spelling, spelling
from rlstreams.schemas.events import Event
from rlstreams.show.report.collect import there
from rlstreams.show.report.fold import FIRST, LAST, THEN, RunFold
from rlstreams.streams.lineage.fold import Lineage
from rlstreams.streams.log.bus import Reader
from rlstreams.streams.log.errors import OffsetGoneError
from rlstreams.streams.log.record import Partition, RawRecord, Record
from rlstreams.streams.log.topics import TOPICS, Topic
from rlstreams.streams.run.run_log import BusLog, RunLog
from rlstreams.streams.views.feed import Feed

POLL_S = 0.05
NEWS_S = 1.0
AGAIN_S = 2.0  # until a log that could not be read is opened anew
STOP_S = 60.0
NEAR = 500  # offsets; to seek costs as much
GONE_S = 5.0  # a record is given up when nothing at all comes for so long
_NUMBERS = {topic.name: number for number, topic in enumerate(TOPICS)}
_BY_GROUP = frozenset(topic.name for topic in TOPICS if topic.key == "group_id")
Places = Mapping[bytes, "array[int]"]  # by group: topic, partition, offset of each record, in a row


class RunReader:
    """Reads one run until it is closed: the small topics first, so that curves are there at once.

    Args:
        name: in addresses.
        place: what commands call it.
        opened: gives what has `log` and `model_path`, again after a failure. The first time in the
            thread of the caller.

    Raises:
        StreamsError: the log cannot be opened.
    """

    def __init__(
        self, name: str, place: str, opened: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.name, self.place = name, place
        self.fold = RunFold()
        self.problem = ""  # why nothing new comes
        self.reading = "reading the log"  # how far it is; empty: at its end
        self.news = 0  # grows when there is something to see: at each step, else once a second
        self._told: tuple[object, ...] = ()
        self._told_s = 0.0
        self._opened = opened
        self._places: Places = {}
        self._stop = threading.Event()
        self._spelling: Spelling | None = None
        self._stack = ExitStack()
        self._source: Any = self._stack.enter_context(opened())
        self._thread = threading.Thread(target=self._run, name=f"reader of {name}", daemon=True)
        self._thread.start()

    def samples(self, name: str) -> tuple[list[Lineage], Spelling]:
        """A sample's history, and how its tokens become text; empty: the log does not know it.

        Read by who asks, from a log of its own: the reader goes on. Once it has read all, records
        are fetched from where it saw them.

        Raises:
            ValueError: no name of a sample.
            StreamsError: the log cannot be read.
        """
        with self._opened() as source:
            log = source.log
            places = self._places  # before we ask whether they are all: the reader may begin anew
            if not self.reading and isinstance(log, BusLog):
                log = _PlacedLog(log, places)
            if self._spelling is None:
                self._spelling = spelling("", source.model_path)
            return log.samples(name), self._spelling

    def close(self) -> None:
        """Stop reading, and close the log; idempotent."""
        self._stop.set()
        self._thread.join(AGAIN_S + STOP_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._source is None:
                    self._source = self._stack.enter_context(self._opened())
                self._read(self._source.log)
            except Exception as err:  # noqa: BLE001 - the page says it
                self.problem = f"the log cannot be read: {err}; trying again"
                self.news += 1
            self._source = None
            self._stack.close()
            self._stop.wait(AGAIN_S)

    def _read(self, log: RunLog) -> None:
        """From the beginning, until it is to stop."""
        fold, places = RunFold(), defaultdict[bytes, "array[int]"](lambda: array("q"))
        if not self.fold.num_events:
            self.fold = fold

        def note(record: Record[Event]) -> None:
            topic, partition, offset = record.position
            if topic in _BY_GROUP:
                places[record.raw.key].extend((_NUMBERS[topic], partition, offset))

        self.reading = "reading the log"  # until then the places are not all
        self._places = places
        with ExitStack() as stack:
            feeds = [
                Feed(log.bus, fold, there(log.bus, topics), note) for topics in (FIRST, THEN, LAST)
            ]
            ends = [feed.ends() for feed in feeds]
            for feed in feeds:
                stack.callback(feed.close)
            while not self._stop.is_set():
                left = [feed.behind(end) for feed, end in zip(feeds, ends, strict=True)]
                self.reading = f"reading the log, {sum(left):,} records left" if sum(left) else ""
                if not left[0]:
                    self.fold, self.problem = fold, ""
                self._tell(self.fold)
                # Of the larger ones the first that is behind; at the end all of them in turn.
                due = next((n for n, num in enumerate(left) if num), len(feeds))
                waits_s = [POLL_S if n == due or not sum(left) else 0.0 for n in range(len(feeds))]
                polled = zip(feeds[: due + 1], waits_s, strict=False)
                num = sum(feed.poll(wait_s) for feed, wait_s in polled)
                if not (num or sum(left) or log.is_growing):
                    self._stop.wait(4 * POLL_S)

    def _tell(self, fold: RunFold) -> None:
        key = (len(fold.views.run.ledger.steps), self.reading == "", self.problem)
        now, is_due = (*key, fold.num_events), time.monotonic() - self._told_s >= NEWS_S
        if now[:-1] != self._told[:-1] or (is_due and now != self._told):
            self._told, self._told_s = now, time.monotonic()
            self.news += 1


class _PlacedLog(RunLog):
    """A log of which it is known where a group's records lie: none is looked for."""

    def __init__(self, log: BusLog, places: Places) -> None:
        self.name, self.bus, self._log, self._places = log.name, log.bus, log, places

    def records(self, topic: Topic, groups: Collection[str] | None = None) -> Iterator[RawRecord]:
        """See `RunLog`; what retention removed meanwhile is passed by."""
        if groups is None:
            yield from self._log.records(topic)
            return
        keys = [key for group in groups if (key := group.encode()) in self._places]
        flat = [self._places[key][:] for key in keys]  # copies: the reader adds to them
        found = (at for one in flat for at in zip(one[::3], one[1::3], one[2::3], strict=True))
        by_partition: defaultdict[Partition, list[int]] = defaultdict(list)
        for number, partition, offset in sorted(found):
            if number == _NUMBERS[topic.name]:
                by_partition[Partition(topic.name, partition)].append(offset)
        begins = self.bus.beginnings(topic.name)
        with self.bus.reader() as reader:
            for at, offsets in by_partition.items():
                left = [offset for offset in offsets if offset >= begins[at]]
                yield from _read_at(reader, at, left)

    def close(self) -> None:
        """Nothing: whoever opened the log closes it."""


def _read_at(reader: Reader, partition: Partition, wanted: list[int]) -> Iterator[RawRecord]:
    """The records at these places; to a near one it is read on, a far one is sought.

    A record of several parts lies where its first part is, and may come after later records.
    """
    at = -NEAR
    until_s = 0.0
    while wanted:
        if wanted[0] - at >= NEAR:
            at, until_s = wanted[0], time.monotonic() + GONE_S
            reader.seek({partition: at})
        try:
            raws = reader.poll(NEAR, POLL_S)
            at = reader.positions()[partition]
        except OffsetGoneError:  # retention removed it just now; what lies further on may be there
            at, wanted = -NEAR, [offset for offset in wanted if offset > at]
            continue
        yield from (raw for raw in raws if raw.position.offset in wanted)
        came = {raw.position.offset for raw in raws}
        wanted = [offset for offset in wanted if offset >= at and offset not in came]
        if raws:
            until_s = time.monotonic() + GONE_S
        elif time.monotonic() > until_s:
            at, wanted = -NEAR, wanted[1:]
