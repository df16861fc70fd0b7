"""`replay step --profile`: a recorded step under torch's profiler makes the recorded weights."""

from __future__ import annotations

import json
from pathlib import Path

from rlstreams.debug.rerun.rerun import profile
from tests.heavy.trainer.trainer_stand import (
    make_config,
    make_log,
    make_trainer,
    train,
)
from tests.memory.bus import MemoryBus


def test_a_step_is_profiled(tmp_path: Path) -> None:
    """The trace is JSON; the heaviest come first."""
    log, config = make_log(), make_config(tmp_path, trainer__steps=2)
    trainer = make_trainer(log, config)
    train(log, trainer, 2)
    trainer.close()
    out = tmp_path / "trace.json"
    found = profile(MemoryBus(log, "demo"), config, 2, checkpoints=[], out=out)
    assert found.is_equal
    seconds = [own_s for _, _, own_s in found.heaviest]
    assert len(seconds) == 10
    assert "and made the recorded weights; trace: " in found.lines(2, out)[-1]
    assert seconds == sorted(seconds, reverse=True)
    assert json.loads(out.read_text())["traceEvents"]
