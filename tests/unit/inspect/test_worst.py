"""Which samples `inspect` lists: the same of a live log and of a recording."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlstreams.cli.inspect import worst
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.recorded_log import RecordedLog
from rlstreams.streams.run.run_log import BusLog, RunLog
from tests.unit.inspect import told_run


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


@pytest.mark.parametrize(
    ("measure", "step", "limit", "names"),
    [
        ("reward", None, 2, ["0/1", "2/0"]),  # low is bad
        ("staleness", None, 1, ["1/0"]),  # began under version 0, was trained on version 1
        ("staleness", 2, 10, ["1/0"]),
        ("tokens", None, 1, ["1/0"]),
        (None, 1, 10, ["0/0", "0/1"]),  # the batch in its order
        (None, 1, 1, ["0/0"]),
        ("reward", 1, 10, ["0/1", "0/0"]),
    ],
)
def test_the_worst_come_first(
    log: RunLog, measure: str | None, step: int | None, limit: int, names: list[str]
) -> None:
    """By a measure, of a step, or both."""
    assert names == worst(log, measure, step, limit)


def test_a_sample_comes_once_and_only_with_a_value(log: RunLog) -> None:
    """Though its trajectory was written twice; all that are scored have a mismatch."""
    samples = worst(log, "reward", None, 20)
    assert sorted(set(samples)) == sorted(samples)
    assert "1/0" in samples
    assert ["0/0", "0/1", "1/0", "2/0", "4/1"] == sorted(worst(log, "mismatch", None, 20))
    assert 7 == len(worst(log, "duration", None, 20))


def test_a_step_that_is_not_there_is_refused(log: RunLog) -> None:
    """With those that are; one that a dethroned trainer wrote is none."""
    with pytest.raises(ConfigError, match=r"step 3 is not in .*: it has steps 1 to 2"):
        worst(log, None, 3, 10)
    with pytest.raises(ConfigError, match="it has no step"):
        worst(told_run.bus_log([]), None, 1, 10)


def test_of_equal_ones_the_earlier_comes_first() -> None:
    """In the order of the log, so that a question has one answer."""
    log = told_run.bus_log([told_run.rollout("7", n, 0)[1] for n in range(50)])
    assert ["7/0", "7/1", "7/2"] == worst(log, "reward", None, 3)
