"""The receipt of a sample: for each span of its tokens, the weights that made it, and the proof.

A span is one segment. For a span that the policy sampled, the receipt names the version, the load
that put those weights into the engine and its verification, and the record of `steps` that made the
version; then the worker and the weights that scored it. Beside the spans, it names the sample's
grader, the step that trained it, and redos of that. Missing or contradicting records are problems.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rlstreams.schemas.events import (
    PolicyLoaded,
    Segment,
    SegmentScore,
    TensorError,
    TrainerStarted,
)
from rlstreams.streams.lineage.fold import Lineage, Made
from rlstreams.streams.tokens import SAMPLED

# Text on a load's verification, by `PolicyLoaded.verified`.
VERIFIED: Mapping[str, str] = {
    "weight_hash": "its hash was computed from the received bytes",
    "transfer": "the server checked the sender's checksum on the way, not its own weights",
    "": "not recorded by that release",
}
JUDGING = ("reward", "environment", "agent", "outcome")  # sections of a configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReceipt:
    """The load by which a worker got a version."""

    load_id: str
    worker: str
    instance: str
    at_ms: int
    channel: str
    weight_hash: str
    verified: str  # in words


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReceipt:
    """The worker and the version that scored a span."""

    worker: str
    instance: str
    anchor: str  # "sampled": the version that sampled it
    policy_version: int
    load: LoadReceipt | None
    mismatch: float | None  # mean distance of both log-probs, nats a token; None: other versions


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReceipt:
    """Tokens `first` to `last` of the sample, from 0: one segment."""

    segment: int
    first: int
    last: int
    author: str
    policy_version: int | None = None
    made: Made | None = None
    load: LoadReceipt | None = None
    score: ScoreReceipt | None = None
    staleness: int | None = None  # in versions, if it was trained
    masked: bool = False  # left out of the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The whole receipt of one sample."""

    sample: str
    outcome: str
    spans: tuple[SegmentReceipt, ...] = ()
    engine: str = ""
    worker: str = ""
    instance: str = ""
    reward: float | None = None
    judged_by: str = ""  # digest of settings, code and templates
    judge: Mapping[str, Any] = field(default_factory=dict)  # settings, of the claim in force
    code: Mapping[str, str] = field(default_factory=dict)  # hashes of files, of that claim
    epoch: int = 0  # of that claim
    trained: Mapping[str, Any] = field(default_factory=dict)  # step, its position, its version
    redone: tuple[Mapping[str, Any], ...] = ()  # times that this step was computed again
    copies: tuple[str, ...] = ()  # later records of it, which nobody uses
    problems: tuple[str, ...] = ()  # contradictions, and records that are not in this log

    @property
    def is_proven(self) -> bool:
        """Whether every token's weights are known and fit."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return the receipt as a dict for `json.dumps`."""
        return asdict(self)


def receipt(lineage: Lineage) -> Receipt:
    """Return the receipt of one sample, from its records."""
    rollout, trained = lineage.rollout, lineage.trained
    spans = tuple(_spans(lineage))
    if rollout is None:
        return Receipt(sample=str(lineage.sample), outcome=str(lineage.outcome))
    claim = lineage.claim
    return Receipt(
        sample=str(lineage.sample),
        outcome=str(lineage.outcome),
        spans=spans,
        engine=rollout.engine,
        worker=rollout.worker,
        instance=rollout.instance,
        reward=rollout.reward,
        judged_by=rollout.judged_by,
        judge=_judging(claim),
        code=dict(claim.hashes) if claim else {},
        epoch=claim.epoch if claim else 0,
        trained={}
        if trained is None
        else {
            "step": trained.step.step,
            "position": str(trained.position),
            "epoch": trained.step.epoch,
            "instance": trained.step.instance,
            "place": trained.index,
            "micro_batch": trained.micro_batch,
            "advantage": trained.ref.advantage,
            "made_version": trained.step.policy_version,
            "weight_hash": trained.step.weight_hash,
        },
        redone=tuple(
            {"by": event.instance, "epoch": event.epoch, "at_ms": event.at_ms,
             "steps": [event.first_step, event.last_step], "equal": event.num_equal}
            for event in lineage.redone
        ),
        copies=tuple(map(str, lineage.copies)),
        problems=tuple(_problems(lineage, spans)),
    )  # fmt: skip


def _judging(claim: TrainerStarted | None) -> dict[str, Any]:
    config = json.loads(claim.config) if claim and claim.config else {}
    return {name: config[name] for name in JUDGING if config.get(name)}


def _spans(lineage: Lineage) -> Iterator[SegmentReceipt]:
    rollout, start = lineage.rollout, 0
    event = lineage.scored.event if lineage.scored is not None else None
    scores = {score.segment: score for score in event.scores} if event else {}
    for number, segment in enumerate(rollout.segments if rollout else ()):
        end = start + len(segment.token_ids)
        span = SegmentReceipt(segment=number, first=start, last=end - 1, author=segment.author)
        if segment.author == "policy" and end > start:
            trained = lineage.trained
            own = scores.get(number)
            span = SegmentReceipt(
                segment=number, first=start, last=end - 1, author=segment.author,
                policy_version=segment.policy_version,
                made=lineage.made.get(segment.policy_version),
                load=_load(lineage.loads.get(segment.load_id)),
                score=None if own is None or event is None else ScoreReceipt(
                    worker=event.worker, instance=event.instance, anchor=own.anchor,
                    policy_version=own.policy_version, load=_load(lineage.loads.get(own.load_id)),
                    mismatch=_mismatch(segment, own),
                ),
                staleness=trained.base_version - segment.policy_version if trained else None,
                masked=trained is not None and number in trained.masked,
            )  # fmt: skip
        yield span
        start = end


def _load(event: PolicyLoaded | None) -> LoadReceipt | None:
    if event is None:
        return None
    return LoadReceipt(
        load_id=event.load_id,
        worker=event.worker,
        instance=event.instance,
        at_ms=event.loaded_at_ms,
        channel=event.channel,
        weight_hash=event.weight_hash,
        verified=VERIFIED.get(event.verified, event.verified),
    )


def _mismatch(segment: Segment, score: SegmentScore) -> float | None:
    behavior = segment.behavior_logprobs
    if score.anchor != SAMPLED or behavior is None:
        return None
    try:
        distance = np.abs(score.proximal_logprobs.numpy() - behavior.numpy())
    except (TensorError, ValueError):
        return None
    return float(distance.mean())


def _problems(lineage: Lineage, spans: tuple[SegmentReceipt, ...]) -> Iterator[str]:
    rollout = lineage.rollout
    assert rollout is not None, "it has spans"
    for span in spans:
        if span.policy_version is None:
            continue
        segment, made, load = rollout.segments[span.segment], span.made, span.load
        what = f"tokens {span.first} to {span.last}"
        if load is None:
            yield f"{what}: their load {segment.load_id or '(none named)'} is not in this log"
        if made is None or not made.weight_hash:
            yield f"{what}: what made version {span.policy_version} is not in this log"
            continue
        named = {"the sampler's": segment.weight_hash, "the load's": load and load.weight_hash}
        for source, found in named.items():
            if found and found != made.weight_hash:
                yield (
                    f"{what}: {source} hash of version {span.policy_version} is {found[:12]}, the "
                    f"ledger's {made.weight_hash[:12]}"
                )
        if load is not None and load.worker != rollout.worker:
            yield f"{what}: sampled by {rollout.worker}, and loaded by {load.worker}"
