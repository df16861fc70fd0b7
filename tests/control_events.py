"""Events of `control`, for tests: the desired state, leases on shared devices, reports."""

from __future__ import annotations

from typing import Any

from rlstreams.schemas.events import ControlState, DeviceLease, WorkerReport

NOW_MS = 1_795_000_000_000


def control_state(**changes: Any) -> ControlState:
    values = {"run": "run", "revision": 1, "state": "running", "by": "up", "at_ms": NOW_MS}
    return ControlState(**{**values, **changes})


def device_lease(**changes: Any) -> DeviceLease:
    values = {"run": "run", "device": "card", "turn": 3, "state": "granted", "holder": "trainer-0"}
    more = {
        "instance": "i1",
        "reason": "it waits",
        "waiting": {"trainer": 16.0},
        "at_ms": NOW_MS,
    }
    return DeviceLease(**{**values, **more, **changes})


def worker_report(**changes: Any) -> WorkerReport:
    values = {
        "worker": "rollout-0",
        "role": "rollout",
        "instance": "r1",
        "state": "working",
        "detail": "",
        "policy_version": 2,
        "counters": {"tokens": 100.0},
        "at_ms": NOW_MS,
    }
    return WorkerReport(**{"host": "sampler", **values, **changes})
