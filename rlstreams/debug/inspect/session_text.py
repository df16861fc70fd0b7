"""A session as lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rlstreams.schemas.calls import REWARD
from rlstreams.streams.log.text import counted
from rlstreams.streams.sessions.figures import CallFigures, OutcomeFigures, SessionFigures


def session_lines(figures: SessionFigures) -> Iterator[str]:
    """Its head, its calls as a tree, what failed, its outcomes in order."""
    agent = f" of agent {figures.agent}" if figures.agent else ""
    after = f" after {figures.seconds:.1f} s" if figures.seconds is not None else ""
    why = f" ({figures.detail})" if figures.detail else ""
    yield (
        f"session {figures.session_id}{agent}: {figures.state}{after}{why}; "
        f"{counted(figures.num_starts, 'start')}, {counted(len(figures.calls), 'call')}, "
        f"{figures.num_replays:,} answered from the log"
    )
    for call in figures.calls:
        yield _call(call)
    for start, status, reason in figures.failures:
        yield f"  refused in start {start}: {status} {reason}"
    if figures.problem:
        yield f"  no sample: {figures.problem}"
    elif figures.num_sampled:
        tied = f"; {counted(figures.ties, 'other call')} as deep" if figures.ties else ""
        yield (
            f"  sample: {1 - figures.undelivered:.0%} of {figures.num_sampled:,} sampled tokens "
            f"are learnt from{tied}"
        )
    for outcome in figures.outcomes:
        yield _outcome(outcome)


def _call(call: CallFigures) -> str:
    mark = "*" if call.is_delivered else "." if call.is_in_sample else " "
    parts = [
        f"{call.prompt_tokens:,} tokens ({call.new_tokens:,} new) + {call.sampled_tokens:,}",
        f"version {', '.join(map(str, call.versions)) or '-'}",
        f"{call.latency_s:.2f} s",
        call.finish_reason,
    ]
    if call.start:
        parts.append(f"start {call.start}")
    if call.replayed_in:
        starts = ", ".join(map(str, call.replayed_in))
        parts.append(f"from the log in start {starts}")
    parts += [why for why in (call.why_not_learnt, call.why_root) if why]
    return f" {mark} {'  ' * call.depth}#{call.number}  {', '.join(parts)}"


def _outcome(outcome: OutcomeFigures) -> str:
    says = f"reward {outcome.reward:g}" if outcome.kind == REWARD else outcome.kind
    parts = "".join(f", {name} {value:g}" for name, value in outcome.parts.items())
    about = "" if outcome.call is None else f" of call #{outcome.call}"
    when = "" if outcome.after_s is None else f", {outcome.after_s:+.1f} s from the close"
    note = f": {outcome.note}" if outcome.note else ""
    replaced = "" if outcome.is_standing else " (replaced by a later one)"
    return f"  {outcome.grader}{about}: {says}{parts}{when}{replaced}{note}"
