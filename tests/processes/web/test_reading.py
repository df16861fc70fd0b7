"""How the page finds a sample's records again, whatever became of the log meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from rlstreams.show.web import placed, reading
from rlstreams.show.web.reading import RunReader
from rlstreams.streams.lineage.fold import Lineage
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.parts import Message, num_parts, part_headers, split
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.log.topics import STEPS, TRAJECTORIES
from rlstreams.streams.run.run_log import BusLog
from tests import factories
from tests.memory.bus import MemoryBus
from tests.memory.consumer import MemoryReader
from tests.memory.log import MemoryLog, State
from tests.processes.web.made_run import MadeRun, Opened, wait_read

AT = Partition(f"run.{TRAJECTORIES.name}", 0)


@contextmanager
def page_of(run: MadeRun, later: MemoryBus | None = None) -> Iterator[RunReader]:
    """What reads `run`; whoever opens the log a second time gets `later`."""
    buses = [run.bus] if later is None else [run.bus, later]

    @contextmanager
    def opened() -> Iterator[Opened]:
        yield Opened(BusLog(buses.pop(0) if buses else run.bus, "run"))

    page = RunReader("run", "runs/run", opened)
    try:
        wait_read([page])
        yield page
    finally:
        page.close()


def sample(page: RunReader, name: str) -> Lineage:
    """Its history, which nothing had to be waited for."""
    began_s = time.monotonic()
    found, _, _ = page.sample(name)
    assert time.monotonic() - began_s < placed.GONE_S
    return found


def offset(found: Lineage) -> int:
    """Where its trajectory lies."""
    return found.trajectory.position.offset


def test_what_retention_removed_is_passed_by() -> None:
    """The other records of the sample are shown, and the group's samples that are left."""
    run = MadeRun()
    run.make_step(1)
    with page_of(run) as page:
        run.log.trim(AT, offset(sample(page, "1/4")))
        gone, there = sample(page, "1/3"), sample(page, "1/4")
    assert (True, True) == (gone.trajectory is None, gone.scored is not None)
    assert there.trajectory is not None


def test_a_history_is_that_of_the_whole_log_and_reads_its_own_step_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of other steps it needs the versions that they made, and not their hundreds of samples."""
    run = MadeRun()
    for step in range(1, 5):
        run.make_step(step)
    dropped = factories.dropped_group(group_id="77")
    run.bus.producer("trainer").commit(
        [outgoing(STEPS, factories.groups_dropped(groups=(dropped,)))]
    )
    decodes: list[RawRecord] = []
    monkeypatch.setattr(
        placed, "decoded", lambda raw, *of: (decodes.append(raw), decoded(raw, *of))[1]
    )
    names = ["1/3", "2/0", "4/1", "77/0", "99/0"]
    with page_of(run) as page, BusLog(run.bus, "run") as log:
        for name in names:
            assert sample(page, name) == log.samples(name)[0]
    assert 4 == len(decodes) == len({raw.position for raw in decodes})


class OneByOne(MemoryBus):
    """Each poll of its readers brings one record."""

    def reader(self, offsets: Mapping[Partition, int] | None = None) -> MemoryReader:
        """See `OneByOne`."""

        class Slow(MemoryReader):
            def poll(self, max_records: int, timeout_s: float) -> Sequence[RawRecord]:
                return super().poll(min(1, max_records), timeout_s)

        return Slow(self._log, self._run, offsets)


@pytest.mark.parametrize("make", [MemoryBus, OneByOne])
def test_a_record_of_several_parts_is_found_behind_later_ones(
    make: Callable[[MemoryLog, str], MemoryBus],
) -> None:
    """Its first part lies before another record of the group, its last part behind it."""
    run = MadeRun()
    large = outgoing(TRAJECTORIES, factories.trajectory(group_id="7", sample=0))
    small = outgoing(TRAJECTORIES, factories.trajectory(group_id="7", sample=1))
    part_bytes = len(large) // 2 + 1
    assert 2 == num_parts(len(large), part_bytes)
    first, last = (
        Message(AT, -1, large.key, part, dict(part_headers(large.headers, "r", n, 2)), 1)
        for n, part in enumerate(split(large.value, part_bytes))
    )
    transaction = run.log.begin("large", run.log.initialise("large"))
    run.log.append(transaction, first)
    run.bus.producer("small").commit([small])
    run.log.append(transaction, last)
    run.log.end(transaction, State.COMMITTED)
    with page_of(run, make(run.log, "run")) as page:
        found = sample(page, "7/0")
        assert offset(found) < offset(sample(page, "7/1"))


class Asked(MemoryBus):
    """Calls `ask` when the page's reader asks where the log ends, before it has read any of it."""

    ask: Callable[[], object] = staticmethod(lambda: None)

    def ends(self, topic: str) -> Mapping[Partition, int]:
        """See `Asked`."""
        ask, self.ask = self.ask, lambda: None
        ask()
        return super().ends(topic)


def test_samples_are_known_while_a_log_that_failed_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its places are not all there yet, so the log itself is looked through."""
    monkeypatch.setattr(reading, "AGAIN_S", 0.01)
    run = MadeRun()
    run.make_step(1)
    again = Asked(run.log, "run")
    known: list[Lineage] = []
    with page_of(run, again) as page:
        again.ask = lambda: known.append(sample(page, "1/1"))
        run.log.create("run.prompts", 1)  # where the reader is, the topic made anew has nothing
        until_s = time.monotonic() + 60
        while not known:
            assert time.monotonic() < until_s, page.problem
            time.sleep(0.01)
    assert known[0].trajectory is not None
