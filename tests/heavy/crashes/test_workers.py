"""Workers that die at every crash point, on the in-memory bus: each sample ends exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlstreams.streams.log.catalogue import Catalogue
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.crash_points import CrashPoint
from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.log.topics import TRAJECTORIES
from rlstreams.streams.log.tracker import MAX_TRIES
from rlstreams.workers.engines.base import Scores, TokenSequence
from rlstreams.workers.model.base import EngineError
from tests.fake_engine import FakeScorer
from tests.newer_release import newer, publish
from tests.unit.roles.stand import tick_until
from tests.unit.roles.test_logprob import segment, trajectory
from tests.unit.workers.crashing import Killed, MortalBus, Site, kill_at

POINTS = [point for point in CrashPoint if not point.startswith("checkpoint")]


@pytest.mark.parametrize("role", ["rollout", "logprob"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("count", [1, 3])
def test_a_successor_finishes_what_a_killed_worker_left(
    tmp_path: Path, role: str, point: CrashPoint, count: int
) -> None:
    """Killed twice at the same place, a third worker ends it: nothing lost, nothing doubled."""
    site = Site(tmp_path, role)
    died = [site.live(kill_at(point, count)) for _ in range(2)]
    assert not site.live()
    assert dict.fromkeys(site.samples, 1) == site.outcomes()
    assert [] == site.letters()
    assert died[0] or count > 1, f"{point} was never reached"


class Fragile(FakeScorer):
    """Dies, or fails, on one sequence."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        if any(13 in sequence.token_ids for sequence in sequences):
            raise self._error
        return super().score(sequences, policy_version, temperature)


@pytest.mark.parametrize("at", [0, 7, 11])
def test_a_record_that_kills_its_worker_ends_as_a_dead_letter(tmp_path: Path, at: int) -> None:
    """After two deaths it is begun alone, then set aside; every other sample is scored once."""
    site = Site(tmp_path, "logprob", odd=at)
    deaths = 0
    while site.live(scorer=Fragile(Killed())):
        deaths += 1
        assert deaths < 10, "the killer was never found"
    (letter,) = site.letters()
    assert ("kills_worker", at) == (letter.reason, letter.sample)
    assert dict.fromkeys(site.samples, 1) == site.outcomes()
    assert deaths == (3 if at == 0 else 4)


@pytest.mark.parametrize("error", [EngineError("too odd"), RuntimeError("shapes differ")])
def test_a_record_that_fails_its_window_is_found_and_the_others_are_scored(
    tmp_path: Path, error: Exception
) -> None:
    """The window is halved until the one record is alone; nobody dies."""
    site = Site(tmp_path, "logprob", odd=5)
    assert not site.live(scorer=Fragile(error))
    (letter,) = site.letters()
    assert ("scoring", 5) == (letter.reason, letter.sample)
    assert str(error) in letter.detail
    assert dict.fromkeys(site.samples, 1) == site.outcomes()


def test_a_scorer_that_fails_on_everything_ends_its_worker(tmp_path: Path) -> None:
    """No record is to blame, so none is set aside."""

    class Broken(FakeScorer):
        def score(self, *_args: object) -> Sequence[Scores]:  # type: ignore[override]
            raise RuntimeError("no device")

    site = Site(tmp_path, "logprob")
    with pytest.raises(RuntimeError, match="no device"):
        site.live(scorer=Broken())
    assert [] == site.letters()


def test_an_output_that_the_broker_never_takes_is_set_aside(tmp_path: Path) -> None:
    """The transaction is split until its record is alone; the others go through."""
    site = Site(tmp_path, "logprob", odd=5)
    site.stand.log.configure("demo.scored-trajectories", {"max.message.bytes": "600"})
    assert not site.live()
    assert dict.fromkeys(site.samples, 1) == site.outcomes()
    (letter,) = site.letters()
    assert ("transaction", 5) == (letter.reason, letter.sample)
    assert "max.message.bytes is 600" in letter.detail


class Silent(Catalogue):
    """Nobody can be asked for a schema."""

    def get(self, _print: bytes, /) -> str | None:
        raise DeadlineError("looking a schema up in schemas[0]: at offset 0 of 16 after 10 s")


def test_a_record_whose_schema_cannot_be_asked_for_is_not_to_blame(tmp_path: Path) -> None:
    """However many workers end at it: the first one that gets an answer scores it."""
    site = Site(tmp_path, "logprob", num_samples=1)
    site.stand.send(newer(outgoing(TRAJECTORIES, trajectory("1", segment(0, 5, 6), group_size=1))))
    site.ends = site.stand.bus().ends(TRAJECTORIES.name)
    for _ in range(2 * MAX_TRIES):
        bus = MortalBus(site.stand)
        bus._catalogue = Silent(bus)
        worker = site._make(bus, None)
        with pytest.raises(DeadlineError):
            tick_until(worker, site.is_covered)
        worker.close()
        bus.expire()
    publish(site.stand.bus())
    assert not site.live()
    assert [] == site.letters()
    assert {("0", 0): 1, ("1", 0): 1} == site.outcomes()
