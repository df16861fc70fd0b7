"""`open_run`: the one way to open a run, be it live, finished, on another host, or recorded.

    from rlstreams import open_run
    from rlstreams.schemas import Trajectory

    with open_run("runs/demo") as log:
        for record in log.read(Trajectory):
            print(record.position, record.event.reward)

`RunLog` has a log's methods. Reading changes nothing: it commits no offset and joins no group.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.errors import ConfigError, TopicMismatchError
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.log.topics import STEPS
from rlstreams.streams.run.place import RunPlace
from rlstreams.streams.run.places import check_place
from rlstreams.streams.run.recorded_log import RecordedLog, is_recording
from rlstreams.streams.run.run_log import BusLog, RunLog

SAY_EVERY_S = 0.5


class NoRunError(ConfigError):
    """The broker has no run of this name, or lacks its topic `steps`; one that begins makes it.

    Args:
        runs: that are there.
    """

    def __init__(self, text: str, runs: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.runs = runs


def open_run(
    name: str | Path | RunPlace,
    *,
    bootstrap: str = "",
    options: Mapping[str, str] = MappingProxyType({}),
    say: Callable[[str], None] = lambda _: None,
) -> RunLog:
    """Open the log of a run; close it, or open it by `with`.

    Args:
        name: the folder of a run or of a recording; with `bootstrap` the id of a run. The broker of
            a run that has ended is started, and stopped when its last reader closes the log.
        bootstrap: `host:port` of the broker of a run that has no folder here.
        options: options of the Kafka client for that broker: TLS, SASL.
        say: called with progress of slow work.

    Raises:
        ConfigError: no such run; the message names the runs that exist.
        RecordingError: a recording that cannot be read.
        BrokerError: the run's broker cannot be reached or started.
    """
    if isinstance(name, RunPlace):
        return _on_broker(name, say)
    if bootstrap:
        return _on_broker(RunPlace(run=str(name), bootstrap=bootstrap, options=options), say)
    if is_recording(name):
        return RecordedLog(name)
    check_place(str(name), or_file=False)
    return _on_broker(RunPlace.of_folder(Path(name)), say)


def _on_broker(place: RunPlace, say: Callable[[str], None]) -> RunLog:
    with ExitStack() as stack:
        stack.callback(say, "")
        bootstrap = stack.enter_context(place.served(say))
        options = place.client_options  # read after the broker's start, which makes its password
        bus = stack.enter_context(
            KafkaBus(bootstrap, place.run, options=options, on_read=_reporter(say))
        )
        try:
            bus.partitions(STEPS.name)
        except TopicMismatchError as err:
            from rlstreams.streams.kafka.admin import runs_of

            runs = runs_of(bootstrap, options)
            if place.run in runs:
                text = f"run {place.run!r} begins, or lacks a topic: {err}"
            else:
                there = ", ".join(runs) or "none"
                text = f"there is no run {place.run!r}: {err}; runs there: {there}"
            raise NoRunError(text, runs) from err
        return BusLog(bus, place.run, close=stack.pop_all().close)
    raise AssertionError


def _reporter(say: Callable[[str], None]) -> Callable[[Sequence[RawRecord]], None]:
    """Return a listener that reports how many records of a topic were read, at most twice a second.

    A topic that is read again is counted anew.
    """
    num_read: Counter[str] = Counter()
    newest: dict[Partition, int] = {}  # offsets
    due_s = time.monotonic() + SAY_EVERY_S

    def report(records: Sequence[RawRecord]) -> None:
        nonlocal due_s
        if not records:
            return
        first, topic = records[0], records[-1].position.topic
        if first.position.offset <= newest.get(first.partition, -1):
            num_read.pop(first.position.topic)
            for partition in [p for p in newest if p.topic == first.position.topic]:
                del newest[partition]
        num_read.update(raw.position.topic for raw in records)
        newest.update((raw.partition, raw.position.offset) for raw in records)
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + SAY_EVERY_S
            say(f"reading {topic}: {num_read[topic]:,} records")

    return report
