"""A session as lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rlstreams.schemas.calls import REWARD
from rlstreams.streams.log.text import counted
from rlstreams.streams.sessions.figures import (
    CallFigures,
    OutcomeFigures,
    Said,
    SessionFigures,
    StartFigures,
)
from rlstreams.words.texts import short


def session_lines(figures: SessionFigures, *, is_full: bool = False) -> Iterator[str]:
    """Yield a session's head, starts, calls as a tree with their messages, failures and outcomes.

    Args:
        is_full: show each message whole; else in one line.
    """
    agent = f" of agent {figures.agent}" if figures.agent else ""
    after = f" after {figures.seconds:.1f} s" if figures.seconds is not None else ""
    detail, *more = figures.detail.split("\n")
    why = f" ({detail})" if detail else ""
    yield (
        f"session {figures.session_id}{agent}: {figures.state}{after}{why}; "
        f"{counted(figures.num_starts, 'start')}, {counted(len(figures.calls), 'call')}, "
        f"{figures.num_replays:,} answered from the log"
    )
    yield from (f"  | {line}" for line in more)
    if figures.num_starts > 1:
        for start in figures.starts:
            yield f"  {start_line(start)}"
    for call in figures.calls:
        mark = "*" if call.is_delivered else "." if call.is_in_sample else " "
        indent = "  " * call.level
        yield f" {mark} {indent}#{call.number}  {call_line(call)}"
        for said in (*call.asked, *([call.answer] if call.answer else [])):
            for line in _said(said, is_full=is_full):
                yield f"      {indent}{line}"
    for start_number, status, reason in figures.failures:
        yield f"  refused in start {start_number}: {status} {reason}"
    if line := sample_line(figures):
        yield f"  {line}"
    for outcome in figures.outcomes:
        note = f": {outcome.note}" if outcome.note else ""
        yield f"  {outcome_line(outcome)}{note}"


def start_line(start: StartFigures) -> str:
    """Return a start's time and worker, its calls, and whether it was lost."""
    when = "" if start.after_s is None else f" after {start.after_s:.1f} s"
    where = f" on {start.worker}" if start.worker else ""
    lost = "; it was lost" if start.is_lost else ""
    return (
        f"start {start.number}{when}{where}: {counted(start.num_calls, 'call')} sampled, "
        f"{start.num_replays:,} answered from the log{lost}"
    )


def sample_line(figures: SessionFigures) -> str:
    """Return the share of sampled tokens that is learnt from, or why none is; "": no token."""
    if figures.problem:
        return f"no sample: {figures.problem}"
    if not figures.num_sampled:
        return ""
    tied = f"; {counted(figures.ties, 'other call')} as deep" if figures.ties else ""
    return (
        f"sample: {1 - figures.undelivered:.0%} of {figures.num_sampled:,} sampled tokens "
        f"are learnt from{tied}"
    )


def call_line(call: CallFigures) -> str:
    """Return a call's figures in one line."""
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
    if call.is_branch:
        parts.append(f"branch of #{call.parent}")
    if call.parallel:
        parts.append(f"parallel to {', '.join(f'#{number}' for number in call.parallel)}")
    parts += [why for why in (call.why_not_learnt, call.why_root) if why]
    return ", ".join(parts)


def outcome_line(outcome: OutcomeFigures) -> str:
    """Return an outcome's grader, reward or kind, parts and time; without the note."""
    says = f"reward {outcome.reward:g}" if outcome.kind == REWARD else outcome.kind
    parts = "".join(f", {name} {value:g}" for name, value in outcome.parts.items())
    about = "" if outcome.call is None else f" of call #{outcome.call}"
    when = "" if outcome.after_s is None else f", {outcome.after_s:+.1f} s from the close"
    replaced = "" if outcome.is_standing else " (replaced by a later one)"
    return f"{outcome.grader}{about}: {says}{parts}{when}{replaced}"


def _said(said: Said, *, is_full: bool) -> Iterator[str]:
    texts = [*([f"({said.thought})"] if said.thought else []), said.text, *said.tools]
    whole = "\n".join(filter(None, texts))
    first, *rest = whole.split("\n") if is_full else [short(whole)]
    yield f"{said.role}: {first}"
    yield from (f"  {line}" for line in rest)
