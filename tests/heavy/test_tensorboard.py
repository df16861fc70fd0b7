"""Rows of figures in TensorBoard's files, as its own reader finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.show.metrics.rows import Row
from rlstreams.show.metrics.tensorboard import TensorBoardFiles
from rlstreams.streams.log.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


def test_scalars_have_the_step_and_the_time_of_the_log(tmp_path: Path) -> None:
    """Not of the reading; a second reading into the same folder is refused."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = TensorBoardFiles(tmp_path)
    rows = [
        Row(kind="step", step=n, at_ms=1000 * n, values={"reward": n / 2, "reward/format": 1.0})
        for n in (1, 2)
    ]
    files.write(rows)
    files.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(1, 1.0, 0.5), (2, 2.0, 1.0)] == [
        (e.step, e.wall_time, e.value) for e in found.Scalars("step/reward")
    ]
    assert {"step/reward", "reward/format"} == set(found.Tags()["scalars"])
    with pytest.raises(ConfigError, match="name a new folder"):
        TensorBoardFiles(tmp_path)
