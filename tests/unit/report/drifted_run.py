"""A made-up run in which a step was done again, with other weights each time."""

from __future__ import annotations

from rlstreams.schemas.events import EVALUATE
from rlstreams.streams.views.feed import Views, ViewState
from tests.factories import (
    NOW_MS,
    prompt,
    redo_drifted,
    sample_ref,
    step_completed,
    trainer_started,
    trajectory,
)

STEPS, EVERY, DRIFTED_AT, DRIFTS = 20, 5, 5, 4


def views_after(drifts: int) -> ViewState:
    """A run of 20 steps, evaluated at each fifth; step 5 was done again, and each redo drifted."""
    views = Views()
    views.apply(trainer_started(run="demo", step_target=STEPS))
    for step in range(1, STEPS + 1):
        if step == DRIFTED_AT + 1:
            for drift in range(1, drifts + 1):
                views.apply(redo_drifted(epoch=1, step=DRIFTED_AT, policy_version=step - 1 + drift))
        version = step if step <= DRIFTED_AT else step + drifts
        samples = (sample_ref(reward=step / STEPS),)
        at_ms = NOW_MS + step * 1000
        views.apply(
            step_completed(
                step, policy_version=version, samples=samples, masked=(),
                started_at_ms=at_ms - 500, finished_at_ms=at_ms,
            )
        )  # fmt: skip
        if step % EVERY == 0:
            sample = {"group_id": f"e{version}-0", "sample": 0, "purpose": EVALUATE}
            views.apply(prompt(**sample))
            views.apply(trajectory(**sample, reward=step / STEPS))
    return views.state
