"""A run's log on its way into the page: one thread reads it, and notes where samples lie."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from rlstreams.schemas.events import Event, Trajectory
from rlstreams.show.report.fold import FIRST, LAST, THEN, RunFold
from rlstreams.show.web.placed import PlacedLog, Places
from rlstreams.streams.lineage.fold import Lineage
from rlstreams.streams.log.bus import present
from rlstreams.streams.log.record import Record
from rlstreams.streams.run.run_log import BusLog, RunLog
from rlstreams.streams.sessions.session import Session
from rlstreams.streams.views.feed import Feed
from rlstreams.words.spelling import Spelling, spelling
from rlstreams.words.texts import Texts

POLL_S = 0.05
NEWS_S = 1.0
AGAIN_S = 2.0  # until a log that could not be read is opened anew
STOP_S = 60.0
SPELLED_AT_ONCE = 200  # samples, where nothing else is to be read


class RunReader:
    """Reads one run until it is closed: the small topics first, so that curves are there at once.

    Args:
        name: of the run in addresses.
        place: of the run in commands.
        opened: opens a source with `log` and `model_path`, again after a failure. The first time
        in the thread of the caller.

    Raises:
        StreamsError: the log cannot be opened.
    """

    def __init__(
        self, name: str, place: str, opened: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.name, self.place = name, place
        self.fold = RunFold()
        self.problem = ""  # why nothing new comes
        self.reading = "reading the log"  # state of the reading; empty: at the log's end
        self.news = 0  # grows when there is something to see: at each step, else once a second
        self._noted: tuple[object, ...] = ()
        self._noted_s = 0.0
        self._opened = opened
        self._places = Places()
        self._stop = threading.Event()
        self._spelling: Spelling | None = None
        self.texts = Texts(self._spelled)
        self._stack = ExitStack()
        self._source: Any = self._stack.enter_context(opened())
        self._model_path: str = self._source.model_path
        self._thread = threading.Thread(target=self._run, name=f"reader of {name}", daemon=True)
        self._thread.start()

    def sample(self, name: str) -> tuple[Lineage, Session | None, Spelling]:
        """A sample's history, the session of its agent if it has one, and how tokens become text.

        The caller's thread reads it from a log of its own, and the reader goes on. Once the reader
        has read all, only what it noted of the group is read.

        Raises:
            ValueError: no name of a sample.
            StreamsError: the log cannot be read.
        """
        with self._opened() as source:
            log, places = source.log, self._places
            if not self.reading and isinstance(log, BusLog):
                log = PlacedLog(log, places)
            (lineage,) = log.samples(name)
            return lineage, next(iter(log.sessions(name)), None), self._spelled()

    def _spelled(self) -> Spelling:
        if self._spelling is None:
            self._spelling = spelling("", self._model_path)
        return self._spelling

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
        """Read from the beginning, until it is to stop."""
        fold, places = RunFold(), Places()
        if not self.fold.num_events:
            self.fold = fold

        def note(record: Record[Event]) -> None:
            places.note(record)
            if isinstance(record.event, Trajectory):
                self.texts.add(record.event)

        self.reading, self._places = "reading the log", places  # incomplete until then
        with ExitStack() as stack:
            feeds = [
                Feed(log.bus, fold, present(log.bus, topics), note)
                for topics in (FIRST, THEN, LAST)
            ]
            ends = [feed.ends() for feed in feeds]
            for feed in feeds:
                stack.callback(feed.close)
            while not self._stop.is_set():
                left = [feed.behind(end) for feed, end in zip(feeds, ends, strict=True)]
                self.reading = f"reading the log, {sum(left):,} records left" if sum(left) else ""
                if not left[0]:
                    self.fold, self.problem = fold, ""
                self._note_news(self.fold)
                # Poll the first larger topic with records left; at the end one after the other.
                due = next((n for n, num in enumerate(left) if num), len(feeds))
                waits_s = [POLL_S if n == due or not sum(left) else 0.0 for n in range(len(feeds))]
                polled = zip(feeds[: due + 1], waits_s, strict=False)
                num = sum(feed.poll(wait_s) for feed, wait_s in polled)
                num += 0 if num else self.texts.spell(SPELLED_AT_ONCE)
                if not (num or sum(left) or log.is_growing):
                    self._stop.wait(4 * POLL_S)

    def _note_news(self, fold: RunFold) -> None:
        key = (len(fold.views.ledger.steps), self.reading == "", self.problem)
        now, is_due = (*key, fold.num_events), time.monotonic() - self._noted_s >= NEWS_S
        if now[:-1] != self._noted[:-1] or (is_due and now != self._noted):
            self._noted, self._noted_s = now, time.monotonic()
            self.news += 1
