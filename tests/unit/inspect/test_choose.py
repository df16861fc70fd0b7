"""Which samples a question finds: the same by scanning a live log and by a recording's index."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlstreams.debug.inspect.choose import Measure, choose
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.recorded_log import RecordedLog
from rlstreams.streams.run.run_log import BusLog, RunLog
from tests.unit.inspect import told_run

MISMATCH, REWARD, STALENESS = Measure.MISMATCH, Measure.REWARD, Measure.STALENESS


@pytest.fixture(scope="module", params=["live", "recording"])
def log(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunLog]:
    """The told run, wherever it lies."""
    bus = told_run.memory_bus()
    if request.param == "live":
        yield BusLog(bus, "told")
        return
    with RecordedLog(told_run.recorded(tmp_path_factory.mktemp("r") / "r", bus)) as recorded:
        yield recorded


def found(log: RunLog, **query: object) -> list[str]:
    return [str(sample) for sample in choose(log, **query)]  # type: ignore[arg-type]


def test_the_worst_reward_comes_first(log: RunLog) -> None:
    """Low is bad."""
    assert ["0/1", "2/0"] == found(log, by=REWARD, limit=2)


def test_a_sample_comes_once(log: RunLog) -> None:
    """Though its trajectory was written twice."""
    samples = found(log, by=REWARD, limit=20)
    assert sorted(set(samples)) == sorted(samples)
    assert "1/0" in samples


def test_the_oldest_comes_first_by_staleness(log: RunLog) -> None:
    """1/0 began under version 0 and was trained on version 1."""
    assert ["1/0", "0/0", "0/1"] == found(log, by=STALENESS)
    assert ["1/0"] == found(log, by=STALENESS, step=2)


def test_a_step_tells_its_batch_in_order(log: RunLog) -> None:
    """And another measure ranks within it."""
    assert ["0/0", "0/1"] == found(log, step=1)
    assert ["0/1", "0/0"] == found(log, step=1, by=REWARD)
    assert ["0/0"] == found(log, step=1, limit=1)


def test_a_step_that_is_not_there_is_refused(log: RunLog) -> None:
    """With those that are; one that a dethroned trainer wrote is none."""
    with pytest.raises(ConfigError, match=r"step 3 is not in .*: it has steps 1 to 2"):
        choose(log, step=3)


def test_mismatch_finds_all_scored_ones(log: RunLog) -> None:
    """All differ by the same here, so all are there, the earliest first."""
    assert ["0/0", "0/1", "1/0", "2/0", "4/1"] == sorted(found(log, by=MISMATCH))


def test_by_tokens_and_duration(log: RunLog) -> None:
    """What the index does not know is scanned."""
    assert "1/0" == found(log, by=Measure.TOKENS)[0]
    assert 7 == len(found(log, by=Measure.DURATION))


def test_a_question_for_nothing_is_refused() -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match="limit must be at least 1, got 0"):
        choose(told_run.bus_log([]), limit=0)


def test_an_empty_log_has_no_step() -> None:
    """And says so."""
    with pytest.raises(ConfigError, match="it has no step"):
        choose(told_run.bus_log([]), step=1)


def test_of_equal_ones_the_earlier_comes_first() -> None:
    """In the order of the log, so that a question has one answer."""
    log = told_run.bus_log([told_run.rollout("7", n, 0)[1] for n in range(50)])
    assert ["7/0", "7/1", "7/2"] == found(log, by=REWARD, limit=3)
