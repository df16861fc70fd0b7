"""What the trainer writes beside its work: no more than says that it lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.schemas.events import TrainerHeartbeat
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.trainer import ledger_writer
from rlstreams.workers.trainer.ledger_writer import LedgerWriter
from tests import factories
from tests.heavy.trainer.trainer_stand import make_config, make_log, read
from tests.memory.bus import MemoryBus


def test_whoever_writes_steps_needs_no_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither after a drop nor at changes that come with each step; `done` is told at once."""
    monkeypatch.setattr(ledger_writer, "HEARTBEAT_S", 3600.0)
    log = make_log()
    bus = MemoryBus(log, "demo")
    context = Context(
        config=make_config(tmp_path), bus=bus, role="trainer", ordinal=0, instance="one"
    )
    writer = LedgerWriter(context, bus.producer("trainer.0"), 1, Reporter(context))
    for state in ("redo", "waiting", "training", "waiting"):
        writer.set_state(state)
        writer.heartbeat()
    dropped = factories.groups_dropped()
    writer.groups_dropped(dropped.groups, dropped.closed, ())
    for state in ("training", "done"):
        writer.set_state(state)
        writer.heartbeat()
    told = [e.state for e in read(log, STEPS.name) if isinstance(e, TrainerHeartbeat)]
    assert ["redo", "waiting", "done"] == told
    writer.close()
