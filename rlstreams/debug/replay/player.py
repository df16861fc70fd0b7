"""Player: writes recorded records, or those of some steps, into a fresh run at any speed.

Values, keys, headers and partitions are those of the recording; offsets are new, so each record's
header `rlstreams-replay-of` names its recorded place. Positions inside of events stay as they were
recorded: they are part of the bytes that steps hash.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from rlstreams.schemas.events import (
    Event,
    PolicyPublished,
    RunBranched,
    StepCompleted,
    TrainerStarted,
)
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import REPLAY_HEADER, Outgoing, RawRecord
from rlstreams.streams.log.text import counted
from rlstreams.streams.log.topics import SCHEMAS
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.streams.recording.table import facts_of
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.claims import config_by
from rlstreams.workers.loop.pending import commit

ENDLESS = sys.maxsize - 1  # the last step of a range without an end


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Some steps, and the groups whose samples they trained."""

    steps: range
    groups: frozenset[str]

    def wants(self, event: Event | None) -> bool:
        """Whether a record with this event is selected; one of neither a group nor a step is not.

        Claims and a branch's first record are always selected: no reader can do without them.
        """
        facts = facts_of(event)
        if isinstance(event, TrainerStarted | RunBranched) or facts.group_id is not None:
            return facts.group_id is None or facts.group_id in self.groups
        # A step starts from the version of the step before.
        is_base = isinstance(event, PolicyPublished) and (facts.step or 0) + 1 in self.steps
        return is_base or (facts.step is not None and facts.step in self.steps)


def range_of(text: str) -> range | None:
    """Parse `3:7`, `3:`, `:7` or `3`; None: all steps. Raises ConfigError: any other text."""
    if not text:
        return None
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else 1
        high = int(last) if last else ENDLESS if colon else low
    except ValueError:
        raise ConfigError(f"--steps must be A:B, A: or :B, got {text!r}") from None
    if low > high:
        raise ConfigError(f"--steps: {text} is empty, because {first} is above {last}")
    return range(low, high + 1)


def selection_of(recording: Recording, steps: range | None) -> Selection | None:
    """Return the selection of the steps with their groups; None: everything.

    Raises NotRecordedError: the recording has none of the steps.
    """
    if steps is None:
        return None
    known = [record.event for record in recording.events(StepCompleted)]
    wanted = [event for event in known if event.step in steps]
    if not wanted:
        numbers = [event.step for event in known]
        there = f"steps {min(numbers)} to {max(numbers)}" if known else "no completed step"
        raise NotRecordedError(f"none of the steps asked for is recorded: there is {there}")
    return Selection(
        steps=steps, groups=frozenset(ref.group_id for one in wanted for ref in one.samples)
    )


def chosen(recording: Recording, selection: Selection | None) -> Iterator[RawRecord]:
    """Yield the selected records, or all, in the order of the recording; schemas in any case."""
    for raw in recording.records():
        is_any = selection is None or raw.position.topic == SCHEMAS.name
        if is_any or (selection is not None and selection.wants(recording.event(raw))):
            yield raw


STREAM_BYTES = 128_000_000  # most bytes of one transaction
STREAM_RECORDS = 200_000
STREAM_S = 2.0


def outgoing_of(raw: RawRecord, run: str) -> Outgoing:
    """Return a recorded record, addressed to the same topic and partition of another run.

    Args:
        run: the recorded run; a record that was itself replayed keeps its first origin.
    """
    topic, partition, offset = raw.position
    origin = {REPLAY_HEADER: f"{run}/{topic}[{partition}]@{offset}".encode()}
    return Outgoing(
        topic=topic,
        key=raw.key,
        value=(raw.value,),
        headers={**origin, **raw.headers},
        partition=partition,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedRecords:
    """Counts of the records that were written."""

    num_records: int
    num_bytes: int
    seconds: float
    by_topic: Mapping[str, int]

    def lines(self) -> list[str]:
        """Return lines for the terminal."""
        rate = self.num_records / max(self.seconds, 1e-9)
        return [
            *(f"{topic:<20} {count:>10,}" for topic, count in sorted(self.by_topic.items())),
            f"{counted(self.num_records, 'record')}, {self.num_bytes / 1e6:,.1f} MB in "
            f"{self.seconds:.1f} s ({rate:,.0f} a second)",
        ]


def play(
    bus: Bus,
    run: str,
    records: Iterable[RawRecord],
    speed: float = math.inf,
    *,
    on_progress: Callable[[int], None] = lambda _: None,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> PlayedRecords:
    """Write all records into the bus's run, in transactions of the records that are due.

    Args:
        run: the recorded run.
        speed: recorded seconds per second; inf: as fast as possible.
        on_progress: called after each transaction with the number of records written so far.
        now_s, sleep: the clock.

    Raises:
        BrokerError: several transactions in a row were aborted.
    """
    left, started_s = iter(records), now_s()
    waiting = next(left, None)
    first_ms = waiting.timestamp_ms if waiting else 0
    by_topic: Counter[str] = Counter()
    num_bytes = 0

    def wait_s(raw: RawRecord) -> float:
        return (raw.timestamp_ms - first_ms) / 1000 / speed - (now_s() - started_s)

    with bus.producer("replay") as producer:
        while waiting is not None:
            sleep(max(0.0, wait_s(waiting)))
            due: list[Outgoing] = []
            size, until_s = 0, now_s() + STREAM_S
            while waiting is not None and (not due or wait_s(waiting) <= 0):
                due.append(outgoing_of(waiting, run))
                by_topic[waiting.position.topic] += 1
                size += len(waiting.value)
                waiting = next(left, None)
                if size >= STREAM_BYTES or len(due) >= STREAM_RECORDS or now_s() > until_s:
                    break
            commit(producer, due)
            num_bytes += size
            on_progress(by_topic.total())
    return PlayedRecords(
        num_records=by_topic.total(),
        num_bytes=num_bytes,
        seconds=now_s() - started_s,
        by_topic=dict(by_topic),
    )


def recorded_config(recording: Recording) -> RunConfig:
    """Return the recorded run's configuration at its newest claim.

    Raises as `config_by`.
    """
    of_trainer = {
        name.removeprefix("trainer."): value
        for name, value in recording.manifest.versions.items()
        if name.startswith("trainer.")
    }
    return config_by(recording.manifest.config, of_trainer)


def replay_config(recording: Recording, *, run_id: str, folder: str, bootstrap: str) -> RunConfig:
    """The recorded configuration, for a fresh run: same partitions, other prefix and folder."""
    config = recorded_config(recording)
    name = run_id or f"{recording.manifest.run}-replay"
    return replace(
        config,
        run=replace(config.run, id=name, dir=folder or "runs/{id}"),
        broker=replace(config.broker, bootstrap=bootstrap, port=0, replication=1, options={})
        if not bootstrap
        else replace(config.broker, bootstrap=bootstrap),
        demo=replace(config.demo, kills=()),
    )
