"""Where an audit's rows come from: read by this process, or by several that each skim a share.

Skimming is most of the work and needs nothing but the record, so partitions can be dealt out. A
helping process opens a bus of its own, is told the ends of a stretch, and sends rows until the
stretch is read; the fold stays in one place.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Protocol, TypeAlias

from rlstreams.streams.audit.rows import Rows, Sieve
from rlstreams.streams.audit.tail import Tail
from rlstreams.streams.log.bus import Bus, Closing
from rlstreams.streams.log.errors import DeadlineError, StreamsError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES

LARGE = (SCORED, TRAJECTORIES, PROMPTS)
STOP_S = 5.0
_LARGE_BLOCK = 31 << 20

Offsets: TypeAlias = Mapping[Partition, int]


class Source(Closing, Protocol):
    """Gives rows of the large topics, in the order of each partition."""

    def rows(self, ends: Offsets) -> Iterator[Rows]:
        """All below `ends` that was not given before; topics that `ends` leaves out rest.

        Raises:
            DeadlineError: a partition did not deliver up to its end.
        """


class OwnSource(Closing):
    """Reads in this process, one topic after the other."""

    def __init__(self, bus: Bus, beginnings: Offsets, deadline_s: float) -> None:
        self._tails = {
            topic.name: Tail(bus, topic, firsts, deadline_s)
            for topic in LARGE
            if (firsts := of_topic(beginnings, topic.name))
        }
        self._sieves = {name: Sieve(name, bus.schemas()) for name in self._tails}

    def rows(self, ends: Offsets) -> Iterator[Rows]:
        """See `Source`."""
        for name, tail in self._tails.items():
            if wanted := of_topic(ends, name):
                for batches in tail.up_to(wanted):
                    yield self._sieves[name].rows(batches)

    def close(self) -> None:
        """Release the readers."""
        for tail in self._tails.values():
            tail.close()


class SharedSource(Closing):
    """Deals the partitions out to `num_processes` processes.

    Args:
        open_bus: makes a bus of the run; called in each process, so it must be picklable.
    """

    def __init__(
        self,
        open_bus: Callable[[], Bus],
        beginnings: Offsets,
        deadline_s: float,
        num_processes: int,
    ) -> None:
        # Every topic's partitions go round, so that each process has its part of the large records.
        order = sorted(beginnings)
        self._shares = [frozenset(order[n::num_processes]) for n in range(num_processes)]
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self._deadline_s = deadline_s
        for share in self._shares:
            ours, theirs = context.Pipe()
            firsts = {p: first for p, first in beginnings.items() if p in share}
            arguments = (theirs, open_bus, firsts, deadline_s)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def rows(self, ends: Offsets) -> Iterator[Rows]:
        """See `Source`."""
        for pipe, share in zip(self._pipes, self._shares, strict=True):
            pipe.send({p: end for p, end in ends.items() if p in share})
        reading = set(self._pipes)
        while reading:
            ready = wait(list(reading), self._deadline_s)
            if not ready:
                raise DeadlineError(
                    f"audit: {len(reading)} of {len(self._pipes)} reading processes did not answer "
                    f"for {self._deadline_s:g} s"
                )
            for pipe in [pipe for pipe in self._pipes if pipe in ready]:
                answer = _received(pipe)
                if answer is None:
                    reading.discard(pipe)
                elif isinstance(answer, StreamsError):
                    raise answer
                else:
                    yield answer

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()


def spare_memory() -> None:
    """Make what an audit does with memory cheap; for a process that does nothing else.

    It makes many small objects and no cycles, so garbage in cycles is looked for seldom. And it
    frees batches of some 30 MB to fill the same room again: glibc's malloc gives such room back to
    the system, a page fault for each 4 kB of the next batch, until it has seen a block as large be
    freed (mallopt(3), M_MMAP_THRESHOLD: the threshold adapts, to at most 32 MiB).
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    bytes(_LARGE_BLOCK)


def of_topic(offsets: Offsets, topic: str) -> Offsets:
    """Those of one topic."""
    return {partition: at for partition, at in offsets.items() if partition.topic == topic}


def _received(pipe: Connection) -> Rows | StreamsError | None:
    try:
        answer: Rows | StreamsError | None = pipe.recv()
    except EOFError as err:
        raise StreamsError("audit: a reading process died; see its last lines") from err
    return answer


def _serve(
    pipe: Connection, open_bus: Callable[[], Bus], beginnings: Offsets, deadline_s: float
) -> None:
    """The reading process: ends in; rows out, then None."""
    spare_memory()
    with open_bus() as bus, OwnSource(bus, beginnings, deadline_s) as source:
        while (ends := _wanted(pipe)) is not None:
            answers: Sequence[StreamsError] = ()
            try:
                for rows in source.rows(ends):
                    if len(rows.place) or rows.unreadable:
                        pipe.send(rows)
            except StreamsError as err:
                answers = (err,)
            except (BrokenPipeError, KeyboardInterrupt):
                return
            for answer in (*answers, None):
                pipe.send(answer)


def _wanted(pipe: Connection) -> Offsets | None:
    """The next stretch; None when the parent has gone."""
    try:
        ends: Offsets = pipe.recv()
    except (EOFError, KeyboardInterrupt):
        return None
    return ends
