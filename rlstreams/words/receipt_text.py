"""The receipt of a sample as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from rlstreams.streams.lineage.receipt import LoadReceipt, Receipt, SegmentReceipt
from rlstreams.words.screen import clock_text, number

_HASH = 12  # digits of a hash that are shown


def receipt_lines(found: Receipt) -> Iterator[str]:
    """Yield a block for each span that the policy sampled, then the sample's own lines."""
    if found.reward is None:
        yield f"receipt of {found.sample}: no token of it is in this log"
        return
    word = "every token's weights are known" if found.is_proven else "it does not fit"
    yield f"receipt of {found.sample}: {word}"
    for problem in found.problems:
        yield f"  PROBLEM  {problem}"
    for span in found.spans:
        if span.policy_version is not None:
            yield from _span(found, span)
    yield f"  judged     reward {found.reward:g} by {found.judged_by or 'an unrecorded grader'}"
    if found.epoch:
        yield f"             settings and files: claim of epoch {found.epoch}, in --json"
    if trained := found.trained:
        masked = sum(span.masked for span in found.spans)
        left = f", {masked} of its spans masked" if masked else ""
        yield (
            f"  trained    by step {trained['step']} ({trained['position']}), which made version "
            f"{trained['made_version']}, {trained['weight_hash'][:_HASH]}{left}"
        )
    for redo in found.redone:
        first, last = redo["steps"]
        yield (
            f"  redone     steps {first} to {last} by {redo['by']}: {redo['equal']} of "
            f"{last - first + 1} weight hashes equal"
        )


def _span(found: Receipt, span: SegmentReceipt) -> Iterator[str]:
    yield f"  tokens {span.first} to {span.last}: version {span.policy_version}"
    yield f"    sampled  by {found.worker} ({found.engine}), process {found.instance}"
    if (made := span.made) is not None:
        by = f"step {made.step} ({made.position})" if made.step else "the model folder"
        yield f"    made     by {by}: {made.weight_hash[:_HASH]}"
    yield from _load("loaded ", span.load)
    if (score := span.score) is not None:
        far = "" if score.mismatch is None else f", {number(score.mismatch)} nats a token away"
        under = f"under version {score.policy_version} ({score.anchor}){far}"
        yield f"    scored   by {score.worker}, process {score.instance}, {under}"
        yield from _load("       ", score.load)


def _load(title: str, load: LoadReceipt | None) -> Iterator[str]:
    if load is not None:
        yield (
            f"    {title}  {clock_text(load.at_ms)} by {load.channel}, {load.weight_hash[:_HASH]}: "
            f"{load.verified} (load {load.load_id})"
        )
