"""Text of the evidence for the terminal: sentences, a table, the next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rlstreams.debug.evidence.findings import (
    ADVANTAGES,
    RECORDS,
    REWARDS,
    SCORES,
    TOKENS,
    Contradiction,
    Evidence,
    FactCheck,
    samples_of,
)
from rlstreams.streams.log.text import counted
from rlstreams.words.screen import visible

GROUPS = 5  # groups that are shown
SAMPLES = 4  # samples of each group
REASONS = 3  # reasons of each check for unchecked facts
_WRONG = {  # the fault of a sample, by the check that found a contradiction
    RECORDS: "was trained otherwise than it was sampled",
    REWARDS: "has another reward than the run's grader gives its answer",
    TOKENS: "has tokens that its log-probs do not belong to",
    SCORES: "has tokens that its weights give other log-probs",
    ADVANTAGES: "has an advantage that is not of its group's rewards",
}


def lines(found: Evidence, name: str, *, is_scan: bool = False) -> list[str]:
    """Return lines on the evidence.

    Args:
        name: the run's name in commands.
        is_scan: look for the first step, rather than for samples of given steps.
    """
    return [
        *_sentences(found, is_scan),
        f"{'checked':<44} {'agree':>9} {'contradict':>10} {'not checked':>11}",
        *(_row(check) for check in found.checks),
        *_reasons(found.checks),
        *_groups(found),
        *_next(found, name, is_scan),
    ]


def _steps(found: Evidence) -> str:
    return f"steps {found.first} to {found.last}" if found.last > found.first else (
        f"step {found.first}"
    )  # fmt: skip


def _sentences(found: Evidence, is_scan: bool) -> Iterator[str]:
    groups = found.by_group
    if found.first_step is None:
        checked = any(check.num_agreed for check in found.checks)
        of = counted(found.num_samples, "sample")
        verdict = f"nothing contradicts the log of {of}" if checked else "nothing could be checked"
        yield f"{_steps(found)}: {verdict}."
        if not any(check.name == SCORES for check in found.checks):
            yield "Not checked: contradictions that only the weights show, --redo."
        return
    if is_scan:
        yield f"Step {found.first_step} is the first that contradicts itself."
    for group in list(groups)[:GROUPS]:
        yield _of_group(group, groups[group])
    if len(groups) > GROUPS:
        yield f"So it is with {len(groups) - GROUPS:,} groups more."
    for one in found.found:
        if one.sample is None:
            yield f"Step {one.step}: {one.message}."
    rest = found.num_samples - len(samples_of(found.found))
    yield f"The other {counted(rest, 'sample')} of {_steps(found)} agree in all that was checked."


def _of_group(group: str, found: Sequence[Contradiction]) -> str:
    samples = samples_of(found)
    worst = max(_WRONG, key=lambda c: len({one.sample for one in found if one.check == c}))
    num = len({one.sample for one in found if one.check == worst})
    also = len(samples) - num
    more = f", and {counted(also, 'more sample')} otherwise" if also else ""
    steps = sorted({one.step for one in found})
    return (
        f"Group {group} (step {steps[0]}) is to blame: {counted(num, 'sample')} of it "
        f"{_WRONG[worst] if num == 1 else _plural(_WRONG[worst])}{more}."
    )


def _plural(words: str) -> str:
    for one, many in (("was ", "were "), ("has ", "have "), (" it ", " they ")):
        words = words.replace(one, many)
    return words.replace(" its ", " their ").replace("another reward", "other rewards")


def _row(check: FactCheck) -> str:
    note = f"  {check.note}" if check.note else ""
    return (
        f"{check.name:<44} {check.num_agreed:>9,} {len(check.found):>10,} "
        f"{check.unchecked.total():>11,}{note}"
    )


def _reasons(checks: Sequence[FactCheck]) -> Iterator[str]:
    for check in checks:
        for why, num in check.unchecked.most_common(REASONS):
            yield visible(f"not checked, {num:,} of `{check.name}`: {why}")


def _groups(found: Evidence) -> Iterator[str]:
    for group, own in list(found.by_group.items())[:GROUPS]:
        yield f"group {group}:"
        of_sample: dict[str, list[str]] = {}
        for one in own:
            assert one.sample is not None
            of_sample.setdefault(str(one.sample), []).append(one.message)
        for sample, messages in list(of_sample.items())[:SAMPLES]:
            yield visible(f"  {sample:<10} {'; '.join(messages)}")
        if len(of_sample) > SAMPLES:
            yield f"  and {len(of_sample) - SAMPLES:,} more: --json"


def _next(found: Evidence, name: str, is_scan: bool) -> Iterator[str]:
    if (first := found.first_step) is None:
        return
    run, group = shlex.quote(name), next(iter(found.by_group), "")
    if is_scan:
        yield f"which samples: rlstreams replay blame {run} --steps {first}"
    elif group:
        yield f"read it: rlstreams inspect {group} {run} --full"
    if first > 1:
        yield f"go on without it: rlstreams replay branch {run} --at {first - 1}"


def as_json(found: Evidence) -> dict[str, object]:
    """Return the whole evidence."""
    return {
        "first": found.first,
        "last": found.last,
        "samples": found.num_samples,
        "first_step": found.first_step,
        "groups": list(found.by_group),
        "checks": [
            {
                "check": check.name,
                "agree": check.num_agreed,
                "unchecked": dict(check.unchecked),
                "note": check.note,
                "contradict": [
                    {
                        "step": one.step,
                        "sample": None if one.sample is None else str(one.sample),
                        "told": one.message,
                    }
                    for one in check.found
                ],
            }
            for check in found.checks
        ],
    }
