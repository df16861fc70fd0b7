"""From a finished rollout to its event. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import EVALUATE, Prompt, Segment, Tensor, Trajectory
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.record import Position
from rlstreams.streams.sessions.experts import row_versions, stitched
from rlstreams.workers.config.run import RolloutSection
from rlstreams.workers.engines.base import Experts, GeneratedSegment, sampled_by
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
        engine=sampled_by(engine, (s for s in said if isinstance(s, GeneratedSegment))),
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
) -> tuple[Experts | None, npt.NDArray[np.uint8] | None]:
    """Routed experts of the whole sample, and which rows are recorded; see `stitched`.

    Args:
        said: all segments after the prompt.
        num_prompt: tokens of the prompt.

    Raises:
        ValueError: rows outside the sample, or segments that disagree on layers, top_k or dtype.
    """
    ends = itertools.accumulate((len(s.token_ids) for s in said), initial=num_prompt)
    *_, num_tokens = spans = list(ends)
    sampled = [
        (segment, end)
        for segment, end in zip(said, spans[1:], strict=True)
        if isinstance(segment, GeneratedSegment)
    ]
    versions = row_versions(
        num_tokens, [(s.policy_version, end) for s, end in sampled if len(s.token_ids)]
    )
    parts = [(s.policy_version, s.routed_experts_start, s.routed_experts) for s, _ in sampled]
    return stitched(versions, [(v, at, rows) for v, at, rows in parts if rows is not None])


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
