"""Another grader's opinion, for the terminal and as JSON: differences, samples, next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rlstreams.debug.evidence.opinion import DisagreementPlace, Judged, Opinion
from rlstreams.streams.log.text import counted
from rlstreams.words.screen import visible
from rlstreams.words.texts import short

GROUPS, SAMPLES = 5, 4  # groups that are shown, and samples of each


def lines(found: Opinion, name: str) -> Iterator[str]:
    """Yield lines on the opinion.

    Args:
        name: the run's name in commands.
    """
    hashed = f" ({found.hash[:12]})" if found.hash else ""
    differ, of = len(found.differing), counted(len(found.judged), "sample")
    what = "another order within their group" if found.has_other_scale else "another reward"
    yield f"{found.grader}{hashed} gives {differ:,} of {of} {what} than they were trained with."
    if found.has_other_scale and found.judged:
        yield "Rewards themselves differ for most: it has another scale."
    for why, num in found.unjudged.most_common(3):
        yield visible(f"not judged, {num:,}: {why}")
    if begins := found.begins:
        yield f"From step {begins.name} on they differ more: {_shares(begins, 'before')}."
    for place in found.makers:
        yield visible(f"More than others: {place.kind} {place.name}, {_shares(place, 'others')}.")
    for place in found.groups[:GROUPS]:
        own = found.of_group(place.name)
        yield f"Group {place.name} (step {own[0].step}) stands out: {_shares(place, 'others')}."
        yield from _samples(own)
    if len(found.groups) > GROUPS:
        yield f"So do {len(found.groups) - GROUPS:,} groups more: --json"
    if differ and not found.groups:
        yield "No group stands out of the others. Those that moved the weights most:"
        yield from _samples(found.differing)
    if differ:
        of_whom = found.groups[0].name if found.groups else str(found.differing[0].name)
        yield f"read it: rlstreams inspect {of_whom} {shlex.quote(name)} --full"


def _shares(place: DisagreementPlace, others: str) -> str:
    here, there = f"{place.num:,} of {place.of:,}", f"{place.num_others:,} of {place.of_others:,}"
    return f"{here} answers, {others} {there}"


def _samples(found: Sequence[Judged]) -> Iterator[str]:
    for one in found[:SAMPLES]:
        says = f"{one.was:g} recorded, it says {one.said:g} of {short(one.text)!r}"
        yield visible(f"  {one.name!s:<10} {says}; advantage {one.advantage:.3g}")
    if len(found) > SAMPLES:
        yield f"  and {len(found) - SAMPLES:,} more: --json"


def as_json(found: Opinion) -> dict[str, object]:
    """Return the whole opinion."""
    return {
        "grader": found.grader,
        "hash": found.hash,
        "judged": len(found.judged),
        "unjudged": dict(found.unjudged),
        "has_other_scale": found.has_other_scale,
        "begins": found.begins and asdict(found.begins),
        "makers": [asdict(place) for place in found.makers],
        "groups": [asdict(place) for place in found.groups],
        "differing": [{**asdict(one), "name": str(one.name)} for one in found.differing],
    }
