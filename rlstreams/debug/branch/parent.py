"""Whether the parent of a branch says of its base what the branch says; for the audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlstreams.streams.audit.report import AuditReport, Breach, BreachKind
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.topics import STEPS
from rlstreams.streams.run.open_run import open_run
from rlstreams.workers.trainer.claim import read_ledger


def with_parent(report: AuditReport, say: Callable[[str], None]) -> AuditReport:
    """The report of a branch with its base compared with the parent's ledger, where that can be
    read; of any other run as it is.

    Args:
        say: told what takes a while: a broker that has stopped is started for a look.
    """
    if (begin := report.begin) is None:
        return report
    try:
        with open_run(begin.parent_place, say=say) as log:
            told = _compared(log.bus, report)
    except (StreamsError, OSError) as err:
        told = f"not compared: its parent cannot be read: {str(err).partition('; ')[0]}"
    is_wrong = told.startswith("its parent's log says")
    report = replace(report, begin=replace(begin, compared=told))
    breach = Breach(kind=BreachKind.HASH_CHAIN, id=f"step {begin.step}", detail=told)
    return report.with_breaches([breach] if is_wrong else [])


def _compared(bus: Bus, report: AuditReport) -> str:
    begin = report.begin
    assert begin is not None
    if bus.topic_ids([STEPS.name])[STEPS.name] != begin.steps_id:
        return f"not compared: {begin.parent_place} is another run's by now"
    fact = read_ledger(bus, "audit").steps.get(begin.step)
    if fact is None:
        return f"not compared: {begin.parent_place} does not hold that step"
    if fact.weight_hash != begin.weight_hash:
        return f"its parent's log says that step {begin.step} left weights {fact.weight_hash}"
    return f"as its parent's log says ({begin.parent_place})"
