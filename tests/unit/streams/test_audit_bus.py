"""The audit reads a run through the port `Bus`, also while transactions are open."""

from __future__ import annotations

import threading

import pytest

from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.log.errors import TopicMismatchError
from rlstreams.streams.log.parts import Message
from rlstreams.streams.log.record import Partition
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog, State
from tests.unit.streams.audit_run import NUM_GROUPS, SIZE, Run


def test_a_record_behind_an_open_transaction_is_waited_for() -> None:
    """Committed, but hidden from every reader until the older transaction is over."""
    run = Run()
    run.issue()
    epoch = run.log.initialise("slow")
    slow = run.log.begin("slow", epoch)
    for number in range(2):
        partition = Partition("run.trajectories", number)
        message = Message(
            partition=partition, offset=-1, key=b"", value=b"", headers={}, timestamp_ms=0
        )
        run.log.append(slow, message)
    run.roll_out()
    assert audit(run.bus, settle_s=0).lost == NUM_GROUPS * SIZE
    timer = threading.Timer(0.05, run.log.end, (slow, State.ABORTED))
    timer.start()
    report = audit(run.bus, settle_s=120)
    timer.join()
    assert report.breach_counts == {}
    assert report.in_flight == {"logprob": NUM_GROUPS * SIZE}


def test_a_run_without_topics_is_refused() -> None:
    """Another run id, or a broker that knows nothing of it."""
    with pytest.raises(TopicMismatchError):
        audit(MemoryBus(MemoryLog(), "nobody"), settle_s=0)
