"""The pace of a run: means over its last steps, and its bottleneck. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlstreams.schemas.events import TrainerStarted
from rlstreams.streams.log.text import counted
from rlstreams.streams.views.run import StepPoint

STEPS = 10  # steps that a mean is over
# Metrics of a step with the seconds of each part, in their order in a step, and their names.
PARTS = {
    "wait_samples_s": "samples",
    "wait_scores_s": "scores",
    "scoring_s": "scoring",
    "forward_backward_s": "passes",
    "optimizer_s": "update",
    "hash_s": "hash",
    "publish_s": "publish",
}
CURES = {  # who is waited for for most of a step, and what makes it faster
    "samples": "raise rollout.slots or rollout.workers, or, where rollout waits for rewards, "
    "reward.processes",
    "scores": "raise logprob.workers or logprob.token_budget, or give it a GPU",
}
MEASURED = frozenset({*PARTS, "train_s", "mfu", "gpu_free_gb", "gpu_alloc_retries"})
"""Metrics that may differ in a step that is done again: measured times and memory."""
_FEW = 0.05  # negligible share of a step, or of the groups
_MOST = 0.5  # share of a step: whoever is waited for so long decides the speed of the run
_SHORT_GB = 1.0  # free memory below which a GPU is short of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Means over the last steps."""

    num_steps: int
    step_s: float  # from step to step
    train_s: float  # of the trainer's computation
    wait_samples_s: float
    wait_scores_s: float
    trained_per_s: float  # tokens of trained samples, prompts included
    sampled_per_s: float  # tokens of trained samples' answers; without those sampled for nothing
    padding: float  # tokens computed over those of samples, shared ones once; 0: not recorded
    mfu: float  # 0: the device's peak is not known
    dropped: float  # share of closed groups that were dropped: sampled, and not trained


def pace(steps: Sequence[StepPoint]) -> Pace | None:
    """Return the means over the last `STEPS` steps; None before the first step."""
    if not steps:
        return None
    # A trainer's first step waits for servers to start, or follows a pause of the run: the means
    # leave it out, if there are others.
    alike = [(a, b) for a, b in pairwise(steps[-STEPS - 1 :]) if a.epoch == b.epoch]
    newest = [b for _, b in alike] or steps[-1:]
    starts = [a.finished_at_ms for a, _ in alike] or [newest[0].started_at_ms]
    span_s = max(sum(map(_span_ms, starts, newest)), 1) / 1000

    def mean(name: str) -> float:
        return sum(p.metrics.get(name, 0.0) for p in newest) / len(newest)

    needed = mean("tokens_real") - mean("tokens_shared")
    dropped = sum(p.num_dropped for p in newest)
    answers = sum(p.metrics.get("response_tokens", 0.0) * p.num_samples for p in newest)
    return Pace(
        num_steps=len(newest),
        step_s=span_s / len(newest),
        train_s=mean("train_s"),
        wait_samples_s=mean("wait_samples_s"),
        wait_scores_s=mean("wait_scores_s"),
        trained_per_s=sum(p.num_tokens for p in newest) / span_s,
        sampled_per_s=answers / span_s,
        padding=mean("tokens_computed") / needed if needed else 0.0,
        mfu=mean("mfu"),
        dropped=dropped / max(1, dropped + sum(p.num_groups for p in newest)),
    )


def _span_ms(start_ms: int, point: StepPoint) -> float:
    """Return the time from the end of the step before to the end of this one; where the clock was
    set back between them, the time that the step waited and computed."""
    if point.finished_at_ms >= start_ms:
        return point.finished_at_ms - start_ms
    waited_s = sum(point.metrics.get(name, 0.0) for name in ("wait_samples_s", "wait_scores_s"))
    return 1000 * waited_s + point.finished_at_ms - point.started_at_ms


def pace_line(steps: Sequence[StepPoint], ranks: int = 1) -> str:
    """Return the means and the bottleneck in one line; "" before there are two steps."""
    found = pace(steps)
    if found is None or len(steps) < 2:
        return ""
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    parts = [
        f"last {counted(found.num_steps, 'step')}: {found.step_s:.2f} s a step",
        f"{found.sampled_per_s:,.0f} tokens/s of trained answers",
        f"{found.trained_per_s / ranks:,.0f} with prompts{each}",
    ]
    if found.mfu:
        parts.append(f"MFU {found.mfu:.2f}")
    if found.padding:
        parts.append(f"{found.padding:.2f} tokens computed for one needed")
    if found.dropped > _FEW:
        parts.append(f"{found.dropped:.0%} of groups dropped")
    return f"{', '.join(parts)}; {_waits(found, 'in each step')}"


def ranks_of(claims: Sequence[TrainerStarted]) -> int:
    """Return the number of ranks of the newest claim's trainer; several ranks have a GPU each."""
    return int(claims[-1].versions.get("ranks", "1")) if claims else 1


def bottleneck(steps: Sequence[StepPoint]) -> str:
    """Return a sentence on the trainer's waits in the last steps; "" before there are two."""
    if len(steps) < 2:
        return ""
    found = pace(steps)
    assert found is not None, "there are steps"
    return _waits(found, f"of {found.step_s:.2f} s a step")


def _waits(found: Pace, of: str) -> str:
    names = {"samples": found.wait_samples_s, "scores": found.wait_scores_s}
    waited = {what: s for what, s in names.items() if s > _FEW * found.step_s}
    if not waited:
        return f"nobody holds the trainer back: it works {found.train_s:.2f} s {of}"
    waits = " and ".join(f"{waited[what]:.2f} s for {what}" for what in waited)
    longest = max(waited, key=lambda what: waited[what])
    cure = f": {CURES[longest]}" if waited[longest] > _MOST * found.step_s else ""
    return f"the trainer waits {waits}, {of}{cure}"


def shortage(steps: Sequence[StepPoint]) -> str:
    """Return a warning that GPU memory ran short in the last steps; "": not as far as known."""
    newest = steps[-STEPS:]
    retries = sum(p.metrics.get("gpu_alloc_retries", 0.0) for p in newest)
    least = min(
        (p.metrics["gpu_free_gb"] for p in newest if "gpu_free_gb" in p.metrics), default=9.0
    )
    if not retries and least >= _SHORT_GB:
        return ""
    return (
        f"memory of the trainer's GPU is short: {least:.1f} GB left, given back and asked for "
        f"again {retries:.0f} times in {len(newest)} steps; lower trainer.micro_batch_tokens, or "
        "see who else is on the GPU"
    )
