"""Records that somebody waits for: committed before he goes on, by the owner of their partition."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress

import pytest

from rlstreams.schemas.events import CallReplayed
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.topics import CALLS, DEAD_LETTERS, PROMPTS, TRAJECTORIES
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.thread import EngineThread
from rlstreams.workers.loop.commit_requests import CommitRequests
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.stage import StageLoop
from tests import factories
from tests.call_events import call_replayed
from tests.contract.buses import Cluster
from tests.contract.polling import WAIT_S, within
from tests.unit.roles.stand import tick_until
from tests.unit.workers.test_stage import HeldStage

NAME = "0/0"


class Owner:
    """A member of the group, and the thread on which somebody asks it."""

    def __init__(self, bus: Bus, ordinal: int) -> None:
        self.stage, self.commits, self.thread = HeldStage(), CommitRequests(), EngineThread()
        context = Context(
            config=RunConfig(), bus=bus, role="rollout", ordinal=ordinal, instance=f"i{ordinal}"
        )
        self.loop = StageLoop(
            *(context, bus, self.stage, PROMPTS.name),
            reporter=Reporter(context),
            interval_s=0.0,
            commits=self.commits,
        )

    def begin(self) -> None:
        tick_until(self.loop, lambda: NAME in self.stage.begun)

    def ask(self, number: int) -> Future[None]:
        made = outgoing(CALLS, call_replayed(start=number), partition=0)
        asking = self.commits.committed(self.stage.begun[NAME].raw, lambda: [made])
        return self.thread.submit(asking)

    def close(self) -> None:
        with suppress(StreamsError):
            self.loop.close()
        self.thread.close()


@pytest.fixture
def owners(cluster: Cluster) -> Iterator[list[Owner]]:
    """Those that a test makes are closed."""
    for topic in (PROMPTS, CALLS, TRAJECTORIES, DEAD_LETTERS):
        cluster.create(topic.name, 1)
    prompt = factories.prompt(group_id="0", sample=0)
    cluster.bus().producer("prompts.0").commit([outgoing(PROMPTS, prompt, partition=0)])
    made: list[Owner] = []
    yield made
    for owner in made:
        owner.close()


def committed(cluster: Cluster) -> list[int]:
    bus = cluster.bus()
    reader, ends = bus.reader(bus.beginnings(CALLS.name)), bus.ends(CALLS.name)
    found: list[int] = []

    def is_read() -> bool | None:
        events = [decoded(raw).event for raw in reader.poll(100, 0.1)]
        found.extend(event.start for event in events if isinstance(event, CallReplayed))
        return all(reader.positions()[p] >= end for p, end in ends.items()) or None

    within(WAIT_S, is_read, "all that is committed")
    reader.close()
    return found


def test_they_are_committed_and_their_input_stays_open(
    cluster: Cluster, owners: list[Owner]
) -> None:
    """Whoever comes next is given it again."""
    owners.append(Owner(cluster.bus(), 0))
    owners[0].begin()
    answers = [owners[0].ask(number) for number in range(3)]
    tick_until(owners[0].loop, lambda: all(answer.done() for answer in answers))
    assert sorted(committed(cluster)) == [0, 1, 2]
    owners.pop().close()
    owners.append(Owner(cluster.bus(), 0))
    owners[0].begin()


def test_who_has_lost_the_partition_commits_nothing_and_answers_nobody(
    cluster: Cluster, owners: list[Owner]
) -> None:
    """It lives, and has not heard of it: its transaction carries the position that it held."""
    owners.append(Owner(cluster.mortal_bus(), 0))
    owners[0].begin()
    cluster.expel(owners[0].loop._consumer)
    owners.append(Owner(cluster.bus(), 1))
    owners[1].begin()
    lost = owners[0].ask(7)
    first = owners[0].loop
    first._poll = lambda: None  # type: ignore[method-assign]
    with suppress(StreamsError):
        tick_until(owners[1].loop, lambda: _ticked(first))
    assert not lost.done()
    answer = owners[1].ask(8)
    tick_until(owners[1].loop, answer.done)
    assert committed(cluster) == [8]


def _ticked(loop: StageLoop) -> bool:
    """Whether it has tried to commit, and learnt what came of it."""
    loop.tick()
    return loop._pending._aborts.num > 0
