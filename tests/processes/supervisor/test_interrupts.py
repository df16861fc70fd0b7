"""Signals while `up` runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rlstreams.up.supervisor.run import Interrupts

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_counted_and_later_means_what_it_meant(number: signal.Signals) -> None:
    """Nothing is raised in the loop; the audit behind it can be interrupted again."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with Interrupts() as interrupts:
            told = [(interrupts.drains, interrupts.kills)]
            for _ in range(2):
                signal.raise_signal(number)
                told.append((interrupts.drains, interrupts.kills))
        assert [(False, False), (True, False), (True, True)] == told
        assert signal.SIG_DFL == signal.getsignal(number)
    finally:
        signal.signal(number, before)
