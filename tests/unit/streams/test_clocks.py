"""Clocks that are set back or forth by an hour, and hosts whose clocks are an hour apart."""

from __future__ import annotations

from rlstreams.schemas.events import Event
from rlstreams.streams.views.workers import throughput
from rlstreams.streams.workers import SILENT_S, Workers
from tests.factories import NOW_MS, worker_report

HOUR_MS = 3_600_000


def reported(*times_ms: int, **changes: object) -> list[Event]:
    """A token each; one report at each of these times."""
    return [
        worker_report(at_ms=at_ms, counters={"tokens": float(n)}, **changes)  # type: ignore[arg-type]
        for n, at_ms in enumerate(times_ms)
    ]


def seconds(first: int, last: int, ahead_ms: int = 0) -> list[int]:
    return [NOW_MS + ahead_ms + 1000 * n for n in range(first, last)]


def test_a_clock_that_is_set_back_hides_no_report() -> None:
    """They were passed by until it had come so far again, and a new process was silent."""
    for step_ms in (-HOUR_MS, HOUR_MS):
        view = Workers()
        for event in reported(*seconds(0, 20), *seconds(20, 40, step_ms)):
            view.apply(event)
        (shown,) = throughput(view).workers
        assert ("working", 39.0) == (shown.state, shown.totals["tokens"])
        assert 1.0 == shown.rates["tokens"]
        for event in reported(*seconds(40, 43, step_ms), instance="second"):
            view.apply(event)
        (shown,) = throughput(view).workers
        assert ("working", "second") == (shown.state, shown.instance)


def test_after_a_step_of_the_clock_silence_is_still_noticed() -> None:
    for step_ms in (-HOUR_MS, HOUR_MS):
        view = Workers()
        both = {"a": seconds(0, 20), "b": seconds(0, 20)}
        both = {name: times + seconds(20, 40, step_ms) for name, times in both.items()}
        both["a"] = both["a"][:25]
        for n in range(40):
            for name, times in both.items():
                if n < len(times):
                    view.apply(worker_report(worker=name, instance=name, at_ms=times[n]))
        assert {"a": "silent", "b": "working"} == {
            shown.worker: shown.state for shown in throughput(view).workers
        }


def test_who_follows_a_log_minds_its_own_clock_alone() -> None:
    """Hosts are an hour behind and ahead of it, one of them jumps: who is quiet is silent."""
    view = Workers()
    steady_ms = NOW_MS
    for n in range(60):
        steady_ms += 1000
        view.passes(steady_ms)
        jump_ms = HOUR_MS if n > 30 else 0
        view.apply(worker_report(worker="a", instance="a", host="a", at_ms=steady_ms - HOUR_MS))
        view.apply(
            worker_report(worker="b", instance="b", host="b", at_ms=steady_ms + HOUR_MS - jump_ms)
        )
        if n < 50:
            view.apply(worker_report(worker="c", instance="c", host="a", at_ms=steady_ms - HOUR_MS))
        silent = {shown.worker for shown in throughput(view).workers if shown.state == "silent"}
        assert ({"c"} if n - 49 > SILENT_S else set()) == silent
