"""Validation of a scored trajectory for training: once, before it is admitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rlstreams.schemas.events import TRAIN, DeadLetter, ScoredTrajectory, Segment, SegmentScore
from rlstreams.workers.config.across import MIN_TEMPERATURE
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.loop.validation import (
    check_logprobs,
    check_trajectory,
    floats_of,
    is_group_number,
)
from rlstreams.workers.model.routes import RouterShape, check_routes

MAX_TEMPERATURE = 1e30  # finite in float32, as are numbers divided by it
ANCHORS = ("sampled", "nearby", "behavior")


def validate(scored: ScoredTrajectory, vocab_size: int, max_tokens: int) -> None:
    """Check that every number that the trainer will use is usable, and every tensor whole.

    Args:
        max_tokens: most that the model takes.

    Raises:
        ValueError: as `check_trajectory`; also scores that are not one per policy segment in order,
            an unknown anchor, one of another version than it names, log-probs of another length or
            impossible ones, a temperature of 0, next to it, or infinite in float32.
    """
    check_trajectory(scored.trajectory, vocab_size, max_tokens)
    for index, segment in enumerate(scored.trajectory.segments):
        is_policy = segment.author == "policy"
        is_usable = MIN_TEMPERATURE <= segment.temperature <= MAX_TEMPERATURE
        if is_policy and not is_usable:
            raise ValueError(
                f"segments[{index}].temperature must be at least {MIN_TEMPERATURE:g} to train on, "
                f"and at most {MAX_TEMPERATURE:g}, got {segment.temperature}"
            )
    _check_scores(scored, vocab_size)


def check_versions(scored: ScoredTrajectory, hashes: Mapping[int, str]) -> None:
    """Check that weights of the ledger sampled every policy segment, and scored it.

    Args:
        hashes: weight hash by version, of all versions that `steps` made.

    Raises:
        ValueError: a version that no step made, or that has another hash in the ledger.
    """
    for index, segment in enumerate(scored.trajectory.segments):
        if segment.author == "policy":
            _check_version(f"segments[{index}]", segment, hashes)
    for index, score in enumerate(scored.scores):
        if score.anchor != "behavior":  # a behavior anchor has no version
            _check_version(f"scores[{index}]", score, hashes)


def _check_version(name: str, by: Segment | SegmentScore, hashes: Mapping[int, str]) -> None:
    version = by.policy_version
    if version not in hashes:
        raise ValueError(
            f"{name}.policy_version must be one that steps made, at most {max(hashes)}, "
            f"got {version}"
        )
    if by.weight_hash not in ("", hashes[version]):
        raise ValueError(
            f"{name}.weight_hash of policy version {version} must be {hashes[version]}, "
            f"got {by.weight_hash}"
        )


def check_reference(scored: ScoredTrajectory, by: LossSection, weight_hash: str = "") -> None:
    """Check that every policy token has the reference's numbers that the loss needs.

    Args:
        weight_hash: of the reference, where it is known.

    Raises:
        ValueError: a token has none, or too few likeliest tokens, or those of another reference.
    """
    for index, score in enumerate(scored.scores if by.why_compared else ()):
        if score.reference_logprobs is None:
            needs = "kind 'distill'" if by.kind == "distill" else "kl_coef"
            raise ValueError(
                f"scores[{index}].reference_logprobs is missing, and trainer.loss.{needs} needs "
                "it: its scoring worker had no reference configured"
            )
        top = score.reference_top_logprobs
        num = 0 if top is None else top.shape[-1]
        if num < by.distill_top_k:
            raise ValueError(
                f"scores[{index}].reference_top_logprobs has {num} tokens of the teacher, and "
                f"trainer.loss.distill_top_k is {by.distill_top_k}"
            )
        if weight_hash and score.reference_hash != weight_hash:
            raise ValueError(
                f"scores[{index}].reference_hash must be {weight_hash}, version 0's with "
                "logprob.reference 'start', else that of the first score that this trainer read, "
                f"got {score.reference_hash or 'none'} from {scored.worker}"
            )


def check_routing(
    scored: ScoredTrajectory, *, is_replayed: bool, shape: RouterShape | None = None
) -> None:
    """Check that both log-probs of the ratio are made with the same routes.

    A row that is not recorded is allowed: both sides leave it to their live router.

    Args:
        is_replayed: the trainer's setting.
        shape: of the trainer's model, which rows must fit.

    Raises:
        ValueError: it was scored under the other setting, or from another model.
    """
    is_scored = any(score.anchor != "behavior" for score in scored.scores)
    if is_scored and scored.routing_replayed != is_replayed:
        raise ValueError(
            f"routing_replayed is {scored.routing_replayed}, but trainer.routing_replay is "
            f"{is_replayed}: the two log-probs of the ratio would be of different routes"
        )
    experts, mask = scored.trajectory.routed_experts, scored.trajectory.routed_experts_mask
    if shape is not None and experts is not None:
        check_routes(experts.numpy(), None if mask is None else mask.numpy(), shape)


def is_ours(letter: DeadLetter) -> bool:
    """Whether a dead letter names a training sample as this run numbers them."""
    return letter.purpose == TRAIN and is_group_number(letter.group_id)


def _check_scores(scored: ScoredTrajectory, vocab_size: int) -> None:
    segments = scored.trajectory.segments
    expected = [i for i, segment in enumerate(segments) if segment.author == "policy"]
    actual = [score.segment for score in scored.scores]
    if expected != actual:
        raise ValueError(f"scores must be of the policy segments {expected}, got {actual}")
    for index, score in enumerate(scored.scores):
        name = f"scores[{index}]"
        if score.anchor not in ANCHORS:
            raise ValueError(f"{name}.anchor must be one of {ANCHORS}, got {score.anchor!r}")
        sampled = segments[score.segment].policy_version
        if score.anchor == "sampled" and score.policy_version != sampled:
            raise ValueError(
                f"{name}.policy_version must be {sampled} with anchor 'sampled', "
                f"got {score.policy_version}"
            )
        num_tokens = len(segments[score.segment].token_ids)
        check_logprobs(f"{name}.proximal_logprobs", score.proximal_logprobs, num_tokens)
        _check_optional(name, score, num_tokens)
        _check_top(name, score, num_tokens, vocab_size)


def _check_top(name: str, score: SegmentScore, num_tokens: int, vocab_size: int) -> None:
    """Check ids [tokens, k] and log-probs: of the vocabulary, distinct at a token."""
    ids, logprobs = score.reference_top_ids, score.reference_top_logprobs
    if ids is None and logprobs is None:
        return
    shape = logprobs.shape if logprobs is not None else ()
    if ids is None or logprobs is None or ids.shape != shape or len(shape) != 2:
        raise ValueError(
            f"{name}.reference_top_ids and reference_top_logprobs must both be [{num_tokens}, k], "
            f"got {list(ids.shape) if ids else None} and {list(shape) if logprobs else None}"
        )
    if shape[0] != num_tokens or ids.dtype != "int32":
        raise ValueError(
            f"{name}.reference_top_ids must be int32 [{num_tokens}, k], got {ids.dtype} "
            f"{list(ids.shape)}"
        )
    flat = replace(logprobs, shape=(num_tokens * shape[1],))
    check_logprobs(f"{name}.reference_top_logprobs", flat, num_tokens * shape[1])
    ids_TK = np.sort(ids.numpy(), axis=1)
    if ids_TK.size and not 0 <= ids_TK.min() <= ids_TK.max() < vocab_size:
        raise ValueError(
            f"{name}.reference_top_ids must be in 0 to {vocab_size - 1}, got {ids_TK.min()} to "
            f"{ids_TK.max()}"
        )
    if (ids_TK[:, 1:] == ids_TK[:, :-1]).any():
        raise ValueError(f"{name}.reference_top_ids must be of different tokens")


def _check_optional(name: str, score: SegmentScore, num_tokens: int) -> None:
    if score.reference_logprobs is not None:
        check_logprobs(f"{name}.reference_logprobs", score.reference_logprobs, num_tokens)
    if score.entropy is not None:
        floats_of(f"{name}.entropy", score.entropy, num_tokens)
