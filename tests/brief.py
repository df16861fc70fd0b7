"""Fixtures for tests whose waits are for nothing: what they wait for comes at once."""

from __future__ import annotations

import os

import pytest

from rlstreams.workers.loop import control, stage


@pytest.fixture(autouse=True)
def brief_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role with nothing to read waits for records; of a log in memory nothing is on its way."""
    monkeypatch.setattr(stage, "IDLE_S", 0.0005)
    monkeypatch.setattr(control, "EVERY_S", 0.0)


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files outlive the process that wrote them also without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
