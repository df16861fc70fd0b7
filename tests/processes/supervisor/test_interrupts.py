"""Signals while `up` runs."""

from __future__ import annotations

import signal

import pytest

from rlstreams.up.supervisor.run import interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_counted_and_later_means_what_it_meant(number: signal.Signals) -> None:
    """Nothing is raised in the loop; the audit behind it can be interrupted again."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with interrupts() as asked:
            assert not asked
            signal.raise_signal(number)
            signal.raise_signal(number)
            assert [number] * 2 == asked
        assert signal.SIG_DFL == signal.getsignal(number)
    finally:
        signal.signal(number, before)
