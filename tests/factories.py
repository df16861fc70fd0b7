"""Builders of events with sensible values: a test names only the fields that it is about."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstreams.schemas.events import (
    AbsentSample,
    ClosedGroups,
    DeadLetter,
    DroppedGroup,
    Endpoint,
    Event,
    GroupsDropped,
    MaskedSegment,
    PartitionPosition,
    PassedOverCheckpoint,
    PolicyLoaded,
    PolicyPublished,
    Prompt,
    PullRequested,
    RedoDrifted,
    ReplacementRequested,
    SampleRef,
    ScoredTrajectory,
    Segment,
    SegmentScore,
    StepCompleted,
    StepsRedone,
    Tensor,
    TrainerHeartbeat,
    TrainerStarted,
    Trajectory,
)
from tests.branch_events import HASH, NOW_MS, run_branched
from tests.call_events import (
    call_committed,
    call_failed,
    call_replayed,
    outcome_reported,
    session_closed,
    session_opened,
)
from tests.control_events import control_state, device_lease, worker_report
from tests.stored_events import policy_stored


def int32s(num_tokens: int, start: int = 0) -> Tensor:
    """Token ids start, start + 1, ..."""
    return Tensor.of(np.arange(start, start + num_tokens, dtype=np.int32))


def float32s(num_tokens: int, value: float = -0.5) -> Tensor:
    """The same log-prob for every token."""
    return Tensor.of(np.full(num_tokens, value, np.float32))


def prompt(**changes: Any) -> Prompt:
    values = {
        "group_id": "7",
        "sample": 1,
        "group_size": 4,
        "purpose": "train",
        "token_ids": int32s(5),
        "tokenizer_hash": HASH,
        "text": "2 + 3 =",
        "answer": "5",
        "metadata": "{}",
        "row": 3,
        "dataset_epoch": 0,
        "min_policy_version": 0,
        "seed": 11,
        "issued_at_ms": NOW_MS,
    }
    return Prompt(**{**values, **changes})


def prompt_segment(num_tokens: int = 5) -> Segment:
    return Segment(author="prompt", token_ids=int32s(num_tokens))


def policy_segment(num_tokens: int = 3, version: int = 2, **changes: Any) -> Segment:
    values = {
        "author": "policy",
        "token_ids": int32s(num_tokens, start=100),
        "policy_version": version,
        "weight_hash": HASH,
        "load_id": f"rollout-0/{version}",
        "behavior_logprobs": float32s(num_tokens),
        "finish_reason": "stop",
    }
    return Segment(**{**values, **changes})


def trajectory(**changes: Any) -> Trajectory:
    values = {
        "group_id": "7",
        "sample": 1,
        "attempt": 0,
        "group_size": 4,
        "purpose": "train",
        "row": 3,
        "dataset_epoch": 0,
        "replacement": 0,
        "segments": (prompt_segment(), policy_segment()),
        "reward": 1.0,
        "reward_parts": {"exact": 1.0},
        "engine": "builtin 1",
        "worker": "rollout-0",
        "instance": "r1",
        "prompt_partition": 1,
        "prompt_offset": 300,
        "started_at_ms": NOW_MS,
        "finished_at_ms": NOW_MS + 90,
    }
    return Trajectory(**{**values, **changes})


def with_experts(num_layers: int = 2, top_k: int = 2, codec: str = "zstd") -> Trajectory:
    """Eight tokens, so seven rows of routed experts; the first row was not recorded."""
    experts = np.arange(7 * num_layers * top_k, dtype=np.uint8).reshape(7, num_layers, top_k)
    mask = np.ones(7, np.uint8)
    mask[0] = 0
    return trajectory(
        routed_experts=Tensor.of(experts, codec),
        routed_experts_mask=Tensor.of(mask),
        judged_by=HASH,
    )


def score(num_tokens: int = 3, version: int = 2, **changes: Any) -> SegmentScore:
    values = {
        "segment": 1,
        "anchor": "sampled",
        "policy_version": version,
        "proximal_logprobs": float32s(num_tokens),
        "weight_hash": HASH,
        "load_id": f"logprob-0/{version}",
        "entropy": float32s(num_tokens, 0.7),
    }
    return SegmentScore(**{**values, **changes})


def scored(of: Trajectory | None = None, **changes: Any) -> ScoredTrajectory:
    values = {
        "trajectory": of or trajectory(),
        "scores": (score(),),
        "worker": "logprob-0",
        "instance": "l1",
        "trajectory_partition": 0,
        "trajectory_offset": 41,
        "scored_at_ms": NOW_MS + 200,
    }
    return ScoredTrajectory(**{**values, **changes})


def sample_ref(group_id: str = "7", sample: int = 1, **changes: Any) -> SampleRef:
    values = {
        "group_id": group_id,
        "sample": sample,
        "partition": 0,
        "offset": 40 + sample,
        "oldest_policy_version": 2,
        "num_tokens": 8,
        "reward": 1.0,
        "advantage": 0.5,
    }
    return SampleRef(**{**values, **changes})


def trainer_started(**changes: Any) -> TrainerStarted:
    values = {
        "run": "run",
        "epoch": 1,
        "instance": "t1",
        "next_step": 1,
        "step_target": 100,
        "policy_version": 0,
        "weight_hash": HASH,
        "cluster_id": "cluster",
        "topic_ids": {"prompts": "id-1"},
        "partitions": {"prompts": 2},
        "config": "{}",
        "hashes": {"model": HASH},
        "versions": {"torch": "2"},
        "started_at_ms": NOW_MS,
        "host": "learner",
    }
    return TrainerStarted(**{**values, **changes})


def step_completed(step: int = 3, **changes: Any) -> StepCompleted:
    values = {
        "run": "run",
        "epoch": 1,
        "instance": "t1",
        "step": step,
        "policy_version": step,
        "weight_hash": HASH,
        "previous_hash": HASH,
        "samples": (sample_ref(sample=0), sample_ref(sample=1)),
        "micro_batches": (2,),
        "batch_hash": HASH,
        "closed": ClosedGroups(watermark=7, above=(9,)),
        "positions": (PartitionPosition(topic="scored-trajectories", partition=0, offset=42),),
        "loss": 0.25,
        "masked": (MaskedSegment(group_id="7", sample=1, segment=1, staleness=3),),
        "absent": (AbsentSample(group_id="7", sample=2, reason="reward"),),
        "rng": b"\x00\x01",
        "metrics": {"entropy": 0.7},
        "staleness": {"0": 6},
        "anchors": {"sampled": 6},
        "started_at_ms": NOW_MS,
        "finished_at_ms": NOW_MS + 100,
    }
    return StepCompleted(**{**values, **changes})


def dropped_group(group_id: str = "8", **changes: Any) -> DroppedGroup:
    values = {
        "group_id": group_id,
        "reason": "stale",
        "permanent": False,
        "staleness": 3,
        "row": 4,
        "dataset_epoch": 0,
        "replacement": 0,
    }
    return DroppedGroup(**{**values, **changes})


def groups_dropped(**changes: Any) -> GroupsDropped:
    values = {
        "run": "run",
        "epoch": 1,
        "instance": "t1",
        "groups": (dropped_group(),),
        "closed": ClosedGroups(watermark=9),
        "dropped_at_ms": NOW_MS,
    }
    return GroupsDropped(**{**values, **changes})


def heartbeat(**changes: Any) -> TrainerHeartbeat:
    values = {
        "run": "run",
        "epoch": 1,
        "instance": "t1",
        "state": "training",
        "next_step": 4,
        "detail": "",
        "at_ms": NOW_MS,
    }
    return TrainerHeartbeat(**{"claim_offset": 7, **values, **changes})


def redo_drifted(**changes: Any) -> RedoDrifted:
    values = {
        "run": "run",
        "epoch": 2,
        "instance": "t2",
        "step": 3,
        "policy_version": 4,
        "expected_hash": HASH,
        "actual_hash": "b2" * 32,
        "at_ms": NOW_MS,
    }
    return RedoDrifted(**{**values, **changes})


def steps_redone(**changes: Any) -> StepsRedone:
    values = {
        "run": "run",
        "epoch": 2,
        "instance": "t2",
        "first_step": 1,
        "last_step": 3,
        "num_equal": 3,
        "seconds": 1.5,
        "at_ms": NOW_MS,
        "passed_over": (PassedOverCheckpoint(checkpoint="000001-00000002", reason="is damaged"),),
    }
    return StepsRedone(**{**values, **changes})


def policy_published(version: int = 2, **changes: Any) -> PolicyPublished:
    values = {
        "model": "policy",
        "policy_version": version,
        "weight_hash": HASH,
        "epoch": 1,
        "instance": "t1",
        "step": version,
        "num_bytes": 1024,
        "layout": '[["w", "float32", [16, 16]]]',
        "endpoints": (Endpoint(channel="file", address="/weights"),),
        "versions_served": (version - 1, version),
        "published_at_ms": NOW_MS,
    }
    return PolicyPublished(**{**values, **changes})


def pull_requested(version: int = 2, **changes: Any) -> PullRequested:
    values = {
        "worker": "rollout-0",
        "instance": "r1",
        "role": "rollout",
        "request_id": "q1",
        "policy_version": version,
        "channel": "file",
        "address": "",
        "requested_at_ms": NOW_MS,
    }
    return PullRequested(**{**values, **changes})


def policy_loaded(version: int = 2, **changes: Any) -> PolicyLoaded:
    values = {
        "worker": "rollout-0",
        "instance": "r1",
        "role": "rollout",
        "load_id": f"rollout-0/{version}",
        "policy_version": version,
        "weight_hash": HASH,
        "epoch": 1,
        "channel": "file",
        "num_bytes": 1024,
        "seconds": 0.1,
        "paused_s": 0.05,
        "loaded_at_ms": NOW_MS,
    }
    return PolicyLoaded(**{**values, **changes})


def dead_letter(**changes: Any) -> DeadLetter:
    values = {
        "group_id": "7",
        "sample": 2,
        "purpose": "train",
        "row": 3,
        "dataset_epoch": 0,
        "replacement": 0,
        "reason": "reward",
        "detail": "verifier raised ValueError",
        "permanent": False,
        "role": "rollout",
        "worker": "rollout-0",
        "origin_topic": "prompts",
        "origin_partition": 1,
        "origin_offset": 17,
        "key": b"7",
        "value": b"\xc3\x01",
        "at_ms": NOW_MS,
    }
    return DeadLetter(**{**values, **changes})


def replacement_requested(**changes: Any) -> ReplacementRequested:
    values = {
        "run": "run",
        "group_id": "7",
        "by": "operator",
        "reason": "verifier mended",
        "at_ms": NOW_MS,
    }
    return ReplacementRequested(**{**values, **changes})


def one_of_each() -> dict[str, Event]:
    """A filled example of every kind of event, by name; also with every optional field set."""
    events: list[Event] = [
        prompt(replaces="2", replacement=1),
        with_experts(),
        scored(with_experts(codec="raw")),
        trainer_started(code={"trainer.loss.kind: loss.py": "def loss(tokens): ..."}),
        step_completed(judged_by={HASH: 2}),
        groups_dropped(),
        heartbeat(disowned=(7,)),
        redo_drifted(),
        steps_redone(),
        run_branched(),
        policy_published(),
        policy_stored(),
        pull_requested(),
        policy_loaded(),
        dead_letter(),
        replacement_requested(),
        worker_report(),
        control_state(limits={"tokens_per_s": 1e4}, workers={"rollout": 4}),
        device_lease(),
        session_opened(),
        call_committed(parent="b0" * 16, routed_experts=Tensor.of(np.zeros((7, 2, 1), np.uint8))),
        call_replayed(),
        call_failed(),
        session_closed(),
        outcome_reported(call_id="c0" * 16, supersedes="o0", parts={"form": 0.5}),
    ]
    return {type(event).__name__: event for event in events}
