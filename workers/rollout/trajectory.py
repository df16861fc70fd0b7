"""From a finished rollout to its event. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from schemas.events import EVALUATE, Prompt, Segment, Tensor, Trajectory
from streams.codec import now_ms
from streams.record import Position
from workers.config.run import RolloutSection
from workers.context import Context
from workers.engines.base import Experts, GeneratedSegment
from workers.rollout.episode import AnySegment, EnvironmentSegment
from workers.rollout.sampling import Rollout


def trajectory_of(
    prompt: Prompt,
    position: Position,
    rollout: Rollout,
    loads: Mapping[int, str],
    engine: str,
    context: Context,
) -> Trajectory:
    """The event of one finished sample.

    Args:
        position: of the prompt's record.
        loads: the `load_id` of each version that the engine held.
        engine: its name and version.
    """
    said = rollout.played.segments
    sampled = [segment for segment in said if isinstance(segment, GeneratedSegment)]
    num_tokens = len(prompt.token_ids) + sum(len(segment.token_ids) for segment in said)
    experts, mask = stitch_experts(sampled, num_rows=num_tokens - 1)
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
        reward=rollout.judgement.reward,
        reward_parts=rollout.judgement.parts,
        routed_experts=None if experts is None else Tensor.of(experts, "zstd"),
        routed_experts_mask=None if mask is None else Tensor.of(mask, "zstd"),
        engine=engine,
        worker=context.worker,
        instance=context.instance,
        prompt_partition=position.partition,
        prompt_offset=position.offset,
        started_at_ms=finished_ms - round(1000 * (rollout.finished_s - rollout.started_s)),
        finished_at_ms=finished_ms,
    )


def stitch_experts(
    segments: Sequence[GeneratedSegment], num_rows: int
) -> tuple[Experts | None, np.ndarray[tuple[int], np.dtype[np.uint8]] | None]:
    """Routed experts of the whole sample, and which rows are recorded (None: all of them).

    A row that came first stays: a resumed request returns rows of old tokens under new weights,
    but the tokens were sampled under the old ones (design, section 4). Rows of an environment's
    tokens, and of the last token of a turn, come with the request of the turn that follows.

    Returns:
        `[num_rows, layers, top_k]` and uint8 `[num_rows]`; None, None if nothing was captured.

    Raises:
        ValueError: rows outside the sample, or segments that disagree on layers, top_k or dtype.
    """
    parts = [(s.routed_experts_start, s.routed_experts) for s in segments]
    rows = [(start, part) for start, part in parts if part is not None and len(part)]
    if not rows:
        return None, None
    first = rows[0][1]
    whole = np.zeros((num_rows, *first.shape[1:]), first.dtype)
    seen = np.zeros(num_rows, np.uint8)
    for start, part in rows:
        if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype:
            raise ValueError(
                f"routed_experts of one sample are {first.dtype} {first.shape[1:]} "
                f"and {part.dtype} {part.shape[1:]}"
            )
        if start < 0 or start + len(part) > num_rows:
            raise ValueError(
                f"routed_experts rows {start} to {start + len(part)} of a sample with {num_rows}"
            )
        fresh = np.flatnonzero(seen[start : start + len(part)] == 0)
        whole[start + fresh] = part[fresh]
        seen[start + fresh] = 1
    return whole, None if seen.all() else seen


def _segment(segment: AnySegment, loads: Mapping[int, str], config: RolloutSection) -> Segment:
    if isinstance(segment, EnvironmentSegment):
        return Segment(author="environment", token_ids=Tensor.of(segment.token_ids))
    return Segment(
        author="policy",
        token_ids=Tensor.of(segment.token_ids.astype(np.int32, copy=False)),
        policy_version=segment.policy_version,
        weight_hash=segment.weight_hash,
        load_id=loads[segment.policy_version],
        behavior_logprobs=Tensor.of(segment.logprobs.astype(np.float32, copy=False)),
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        finish_reason=segment.finish_reason,
    )
