"""From a finished rollout to its event. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlstreams.schemas.events import EVALUATE, NO_VERSION, Prompt, Segment, Tensor, Trajectory
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.record import Position
from rlstreams.workers.config.run import RolloutSection
from rlstreams.workers.engines.base import Experts, GeneratedSegment
from rlstreams.workers.loop.context import Context
from rlstreams.workers.policy.puller import Load
from rlstreams.workers.rollout.episode import AnySegment, EnvironmentSegment, Played


def trajectory_of(
    prompt: Prompt,
    position: Position,
    rollout: Played,
    loads: Mapping[int, Load],
    engine: str,
    context: Context,
    judge: str = "",
) -> Trajectory:
    """The event of one finished sample.

    Args:
        position: of the prompt's record.
        loads: of each version that the engine held.
        engine: its name and version.
        judge: see `agreement.judged_by`.
    """
    said, judgement = rollout.segments, rollout.judgement
    assert judgement is not None  # the sampler's last act
    experts, mask = stitch_experts(said, num_prompt=len(prompt.token_ids))
    finished_ms = now_ms()
    config = context.config
    sampled_as = config.evaluation if prompt.purpose == EVALUATE else config.rollout
    return Trajectory(
        group_id=prompt.group_id,
        sample=prompt.sample,
        attempt=rollout.attempt,
        group_size=prompt.group_size,
        purpose=prompt.purpose,
        row=prompt.row,
        dataset_epoch=prompt.dataset_epoch,
        replacement=prompt.replacement,
        segments=(
            Segment(author="prompt", token_ids=prompt.token_ids),
            *(_segment(segment, loads, sampled_as) for segment in said),
        ),
        reward=judgement.reward,
        reward_parts=judgement.parts,
        reward_note=judgement.note,
        routed_experts=None if experts is None else Tensor.of(experts, "zstd"),
        routed_experts_mask=None if mask is None else Tensor.of(mask, "zstd"),
        engine=engine,
        worker=context.worker,
        instance=context.instance,
        prompt_partition=position.partition,
        prompt_offset=position.offset,
        started_at_ms=finished_ms - round(1000 * rollout.sample_s),
        finished_at_ms=finished_ms,
        judged_by=judge,
    )


def stitch_experts(
    said: Sequence[AnySegment], num_prompt: int
) -> tuple[Experts | None, np.ndarray[tuple[int], np.dtype[np.uint8]] | None]:
    """Routed experts of the whole sample, and which rows are recorded (None: all of them).

    A token's row belongs to the version under which the token was first passed: that of the next
    tokens that the policy sampled. A later request returns rows of all tokens before it once more,
    under its own weights: a row that came first stays, and one of another version is not taken for
    one that is missing. Rows of an environment's tokens, and of the last token of a turn, come with
    the request of the turn that follows.

    Args:
        said: everything behind the prompt.
        num_prompt: tokens of the prompt.

    Returns:
        `[tokens - 1, layers, top_k]` and uint8 `[tokens - 1]`; None, None if nothing was captured.

    Raises:
        ValueError: rows outside the sample, or segments that disagree on layers, top_k or dtype.
    """
    sampled = [segment for segment in said if isinstance(segment, GeneratedSegment)]
    parts = [(s.policy_version, s.routed_experts_start, s.routed_experts) for s in sampled]
    rows = [(version, at, part) for version, at, part in parts if part is not None and len(part)]
    if not rows:
        return None, None
    first = rows[0][2]
    versions = _row_versions(said, num_prompt)
    num_rows = len(versions)
    whole = np.zeros((num_rows, *first.shape[1:]), first.dtype)
    seen = np.zeros(num_rows, np.uint8)
    for version, start, part in rows:
        if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype:
            raise ValueError(
                f"routed_experts of one sample are {first.dtype} {first.shape[1:]} "
                f"and {part.dtype} {part.shape[1:]}"
            )
        if start < 0 or start + len(part) > num_rows:
            raise ValueError(
                f"routed_experts rows {start} to {start + len(part)} of a sample with {num_rows}"
            )
        here = slice(start, start + len(part))
        fresh = np.flatnonzero((seen[here] == 0) & (versions[here] == version))
        whole[start + fresh] = part[fresh]
        seen[start + fresh] = 1
    return whole, None if seen.all() else seen


def _row_versions(said: Sequence[AnySegment], num_prompt: int) -> np.ndarray[Any, Any]:
    """The version that first passed each token but the last, int64 [tokens - 1]."""
    versions = np.full(num_prompt + sum(len(s.token_ids) for s in said) - 1, NO_VERSION, np.int64)
    done = 0  # rows that have an owner
    end = num_prompt
    for segment in said:
        end += len(segment.token_ids)
        if isinstance(segment, GeneratedSegment) and len(segment.token_ids):
            versions[done : end - 1] = segment.policy_version
            done = end - 1
    return versions


def _segment(segment: AnySegment, loads: Mapping[int, Load], config: RolloutSection) -> Segment:
    if isinstance(segment, EnvironmentSegment):
        return Segment(author="environment", token_ids=Tensor.of(segment.token_ids))
    return Segment(
        author="policy",
        token_ids=Tensor.of(segment.token_ids.astype(np.int32, copy=False)),
        policy_version=segment.policy_version,
        weight_hash=segment.weight_hash,
        load_id=loads[segment.policy_version].load_id,
        behavior_logprobs=Tensor.of(segment.logprobs.astype(np.float32, copy=False)),
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        finish_reason=segment.finish_reason,
    )
