"""Screens of one recorded run are those that were looked at: see `tests/screens.py`."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlstreams.streams.audit import auditor
from rlstreams.streams.audit.classes import Classes
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.log.topics import (
    DEAD_LETTERS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
)
from rlstreams.streams.run.run_log import BusLog
from tests import screens
from tests.unit.inspect import told_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return screens.recorded(tmp_path_factory.mktemp("screens"))


@pytest.mark.parametrize("name", screens.SCREENS)
def test_a_screen_is_as_it_was(name: str, run: Path) -> None:
    """To change one on purpose: `python -m tests.screens`, and read what changed."""
    assert (screens.FOLDER / f"{name}.txt").read_text("utf-8") == screens.screen(name, run)


def test_an_audit_of_a_recording_waits_for_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A breach that might heal in a live run is one there."""
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
    monkeypatch.setattr(auditor, "time", clock)
    assert "lost" in screens.screen("audit", run)


def test_no_screen_is_left_that_nobody_compares() -> None:
    assert {f"{name}.txt" for name in screens.SCREENS} == {f.name for f in screens.FOLDER.iterdir()}


def test_a_report_is_the_same_in_whatever_order_partitions_are_read() -> None:
    bus = told_run.memory_bus()
    log = BusLog(bus, told_run.RUN)
    topics = (PROMPTS, POLICY_VERSIONS, POLICY_PULLS, TRAJECTORIES, SCORED, DEAD_LETTERS)

    def text(*partitions: int) -> str:
        fold = AuditFold(schemas=bus.schemas())
        for raw in log.records(STEPS):
            fold.train(fold.foresee(raw), raw.position)  # type: ignore[arg-type]
        for topic in topics:
            raws = list(log.records(topic))
            for number in partitions:
                for raw in raws:
                    if raw.partition.number == number:
                        fold.take(raw)
        return Classes(fold, None).report().text()

    assert text(0, 1) == text(1, 0)
    assert "missing sample" in text(0, 1)
