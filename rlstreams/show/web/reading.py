"""A run's log on its way into the page: one thread reads it, and answers what needs the log."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

from rlstreams.debug.inspect.words import Spelling, spelling
from rlstreams.show.report.collect import there
from rlstreams.show.report.fold import FIRST, LAST, THEN, RunFold
from rlstreams.streams.lineage.fold import Lineage
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.views.feed import Feed

T = TypeVar("T")
POLL_S = 0.05
NEWS_S = 1.0
AGAIN_S = 2.0  # until a log that could not be read is opened anew
ANSWER_S = 60.0


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
        self._jobs: queue.SimpleQueue[tuple[Callable[[RunLog], object], Future[object]]]
        self._jobs = queue.SimpleQueue()
        self._stop = threading.Event()
        self._spelling: Spelling | None = None
        self._stack = ExitStack()
        self._source: Any = self._stack.enter_context(opened())
        self._thread = threading.Thread(target=self._run, name=f"reader of {name}", daemon=True)
        self._thread.start()

    def samples(self, name: str) -> tuple[list[Lineage], Spelling]:
        """A sample's history, and how its tokens become text; empty: the log does not know it.

        Raises:
            ValueError: no name of a sample.
            StreamsError: the log cannot be read.
        """
        return self._ask(lambda log: (log.samples(name), self._spelled()))

    def _ask(self, answer: Callable[[RunLog], T]) -> T:
        """Answered in the reader's thread, between two polls."""
        future: Future[T] = Future()
        self._jobs.put((answer, future))  # type: ignore[arg-type]
        return future.result(ANSWER_S)

    def _spelled(self) -> Spelling:
        if self._spelling is None:
            self._spelling = spelling("", self._source.model_path)
        return self._spelling

    def close(self) -> None:
        """Stop reading, and close the log; idempotent."""
        self._stop.set()
        self._thread.join(AGAIN_S + ANSWER_S)

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
        fold = RunFold()
        if not self.fold.num_events:
            self.fold = fold
        with ExitStack() as stack:
            feeds = [Feed(log.bus, fold, there(log.bus, topics)) for topics in (FIRST, THEN, LAST)]
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
                self._answer(log, wait_s=0.0 if num or sum(left) or log.is_growing else 4 * POLL_S)

    def _tell(self, fold: RunFold) -> None:
        key = (len(fold.views.run.ledger.steps), self.reading == "", self.problem)
        now, is_due = (*key, fold.num_events), time.monotonic() - self._told_s >= NEWS_S
        if now[:-1] != self._told[:-1] or (is_due and now != self._told):
            self._told, self._told_s = now, time.monotonic()
            self.news += 1

    def _answer(self, log: RunLog, wait_s: float) -> None:
        try:
            while True:
                answer, future = self._jobs.get(timeout=wait_s) if wait_s else self._jobs.get(False)
                try:
                    future.set_result(answer(log))
                except Exception as err:  # noqa: BLE001 - whoever asked gets it
                    future.set_exception(err)
        except queue.Empty:
            return
