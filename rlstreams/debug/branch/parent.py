"""The base of a branch compared with its parent's log, for the audit."""

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
    """Return the report with a branch's base compared with its parent's ledger, if readable; of any
        other run the report unchanged.

    Args:
        say: called with progress of slow work: a stopped broker is started for the comparison.
    """
    if (begin := report.begin) is None:
        return report
    try:
        with open_run(begin.parent_place, say=say) as log:
            compared = _compared(log.bus, report)
    except (StreamsError, OSError) as err:
        compared = f"not compared: its parent cannot be read: {str(err).partition('; ')[0]}"
    is_wrong = compared.startswith("its parent's log says")
    report = replace(report, begin=replace(begin, compared=compared))
    breach = Breach(kind=BreachKind.HASH_CHAIN, id=f"step {begin.step}", detail=compared)
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
