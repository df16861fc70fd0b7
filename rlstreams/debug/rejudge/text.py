"""Changes that another grader would have made, as lines of text and as one JSON object."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from rlstreams.debug.rejudge.rejudge import Grader, NewAdvantages, NewOutcome, Rejudged
from rlstreams.schemas.calls import REWARD
from rlstreams.streams.log.text import by_number, counted
from rlstreams.words.screen import number
from rlstreams.words.texts import short

_MOST = 20  # samples, and steps, that are listed; the JSON lists all


def lines(found: Rejudged, grader: Grader, name: str) -> Iterator[str]:
    """Yield samples whose reward changes, the largest change first; steps; the exact ones.

    Args:
        name: the run's name.
    """
    yield f"{name}, judged by {grader.name}" + (f" ({grader.hash[:12]})" if grader.hash else "")
    changed = sorted((one for one in found.outcomes if one.is_changed), key=_by_change)
    if changed:
        yield f"{'sample':>10}  {'was':>8}  {'now':>8}  answer"
    for one in changed[:_MOST]:
        note = f"  ({short(one.event.note)})" if one.event.note else ""
        rewards = f"{_was(one):>8}  {one.event.reward:>8.4g}"
        yield f"{one.sample!s:>10}  {rewards}  {short(one.text)}{note}"
    yield from _more(len(changed))
    failed = [one for one in found.outcomes if one.event.kind != REWARD]
    for one in failed[:_MOST]:
        yield f"{one.sample!s:>10}  no reward: {short(one.event.note)}"
    yield from _more(len(failed))
    yield _summary(found)
    if found.steps:
        yield f"{'step':>10}  {'samples with another advantage':>30}  {'largest change':>14}"
    for step in found.steps[:_MOST]:
        of = f"{step.num_changed} of {len(step.names)}"
        yield f"{step.step:>10}  {of:>30}  {_largest(step):>14.4g}"
    yield from _more(len(found.steps))
    yield (
        f"{found.num_exact:,} of {counted(found.num_steps, 'step')}: the recorded advantages come "
        "out of the recorded rewards, bit for bit"
    )


def _summary(found: Rejudged) -> str:
    both = [(one.was, one.event.reward) for one in found.outcomes
            if one.event.kind == REWARD and one.was is not None]  # fmt: skip
    means = ""
    if both:
        was, now = (statistics.fmean(rewards) for rewards in zip(*both, strict=True))
        means = f", mean reward {number(was)}, now {number(now)}"
    beside = [
        f"{found.num_unjudged:,} sessions that failed are not judged" if found.num_unjudged else "",
        f"{found.num_open:,} are open" if found.num_open else "",
    ]
    summary = "; ".join(filter(None, [
        f"{counted(len(found.outcomes), 'sample')} judged{means}",
        f"{found.num_changed:,} changed", f"{found.num_failed:,} without a reward", *beside,
    ]))  # fmt: skip
    return summary


def _more(num: int) -> Iterator[str]:
    if num > _MOST:
        yield f"{'':>10}  and {num - _MOST:,} more: --json"


def as_json(found: Rejudged, grader: Grader, name: str) -> dict[str, Any]:
    """Return all figures, and the samples that change or fail."""
    return {
        "run": name,
        "grader": grader.name,
        "hash": grader.hash,
        "judged": len(found.outcomes),
        "changed": found.num_changed,
        "failed": found.num_failed,
        "unjudged": found.num_unjudged,
        "open": found.num_open,
        "steps": found.num_steps,
        "steps_exact": found.num_exact,
        "samples": [
            {
                "sample": str(one.sample),
                "was": one.was,
                "now": one.event.reward if one.event.kind == REWARD else None,
                "parts": one.event.parts,
                "note": one.event.note,
                "text": one.text,
            }
            for one in found.outcomes
            if one.is_changed or one.event.kind != REWARD
        ],
        "steps_changed": [
            {
                "step": step.step,
                "is_exact": step.is_exact,
                "num_changed": step.num_changed,
                "largest_change": _largest(step),
                "samples": [f"{group}/{sample}" for group, sample in step.names],
                "was": step.was,
                "now": step.now,
            }
            for step in found.steps
        ],
    }


def _was(one: NewOutcome) -> str:
    return "-" if one.was is None else f"{one.was:.4g}"


def _by_change(one: NewOutcome) -> tuple[float, tuple[str | int, ...]]:
    return -abs(one.event.reward - (one.was or 0.0)), by_number(str(one.sample))


def _largest(step: NewAdvantages) -> float:
    """Return the largest change of its advantages, with its sign."""
    return max((b - a for a, b in zip(step.was, step.now, strict=True)), key=abs, default=0.0)
