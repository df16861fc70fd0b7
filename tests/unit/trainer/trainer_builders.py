"""Builders of what the trainer reads, and a model small enough to train in a test."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from rlstreams.schemas.events import (
    TRAIN,
    ScoredTrajectory,
    Segment,
    SegmentScore,
    Tensor,
    Trajectory,
)
from rlstreams.streams.log.record import Position
from rlstreams.streams.segments import num_tokens
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.trainer.intake.groups import DeadSample, PolicySegment, SeenSample
from rlstreams.workers.trainer.learn.advantage import advantages_by
from rlstreams.workers.trainer.learn.cutting import planned_cut
from rlstreams.workers.trainer.learn.packing import Batch, pack
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import weight_hash

VOCAB_SIZE = 12


def seen(
    group=0,
    sample=0,
    *,
    size=2,
    versions=(0,),
    offset=None,
    purpose=TRAIN,
    judged_by="",
) -> SeenSample:
    return SeenSample(
        group_id=str(group),
        sample=sample,
        group_size=size,
        purpose=purpose,
        row=7,
        dataset_epoch=0,
        replacement=1,
        position=Position(
            "scored-trajectories",
            0,
            int(group) * 100 + sample if offset is None else offset,
        ),
        num_tokens=5,
        segments=tuple(PolicySegment(i + 1, version) for i, version in enumerate(versions)),
        judged_by=judged_by,
    )


def dead(group=0, sample=0, *, permanent=False, offset=0, purpose=TRAIN) -> DeadSample:
    return DeadSample(
        group_id=str(group),
        sample=sample,
        purpose=purpose,
        row=7,
        dataset_epoch=0,
        replacement=1,
        reason="reward",
        permanent=permanent,
        position=Position("dead-letters", 0, offset),
        origin=Position("trajectories", 0, offset),
    )


def floats(values) -> Tensor:
    return Tensor.of(np.asarray(values, np.float32))


def ids(values) -> Tensor:
    return Tensor.of(np.asarray(values, np.int32))


def policy_segment(token_ids, logprobs, version=0, temperature=1.0) -> Segment:
    return Segment(
        author="policy",
        token_ids=ids(token_ids),
        policy_version=version,
        behavior_logprobs=floats(logprobs),
        temperature=temperature,
        finish_reason="stop",
    )


def prompt_segment(token_ids=(1, 2)) -> Segment:
    return Segment(author="prompt", token_ids=ids(token_ids))


def score(segment, logprobs, anchor="sampled", version=0) -> SegmentScore:
    return SegmentScore(
        segment=segment,
        anchor=anchor,
        policy_version=version,
        proximal_logprobs=floats(logprobs),
    )


def scored(segments=None, scores=None, *, group="0", sample=0, reward=1.0) -> ScoredTrajectory:
    return ScoredTrajectory(
        trajectory=Trajectory(
            group_id=group,
            sample=sample,
            attempt=0,
            group_size=8,
            purpose=TRAIN,
            row=0,
            dataset_epoch=0,
            replacement=0,
            segments=tuple(segments or (prompt_segment(), policy_segment([3, 4], [-0.5, -1.0]))),
            reward=reward,
        ),
        scores=tuple(scores or (score(1, [-0.6, -0.9]),)),
    )


def random_samples(count, seed=0, max_answer=5) -> list[ScoredTrajectory]:
    """Samples of groups of four, with answers of one to `max_answer` tokens."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        num = int(rng.integers(1, max_answer + 1))
        behavior = -rng.uniform(0.5, 3.0, num)
        proximal = behavior + rng.normal(0, 0.05, num)
        samples.append(
            scored(
                (
                    prompt_segment(rng.integers(0, VOCAB_SIZE, 2)),
                    policy_segment(rng.integers(0, VOCAB_SIZE, num), behavior),
                ),
                (score(1, np.minimum(proximal, 0)),),
                group=str(index // 4),
                sample=index % 4,
                reward=float(rng.integers(0, 2)),
            )
        )
    return samples


def packed_within(samples, advantages, masked, *, token_budget, in_bins=False, **options) -> Batch:
    """Packed by the cut that a trainer plans for such a micro-batch, or by that among `options`."""
    shared = {name: options[name] for name in ("minibatches", "prefixes") if name in options}
    planned = planned_cut(
        [num_tokens(sample.trajectory) for sample in samples],
        [sample.trajectory.group_id for sample in samples],
        token_budget,
        in_bins=in_bins,
        **shared,
    )
    return pack(samples, advantages, masked, **({"cut": planned} | options))


def batch_of(samples, masked=(), by=None, **options) -> Batch:
    """Packed with the advantages of their rewards."""
    rewards = [sample.trajectory.reward for sample in samples]
    groups = [sample.trajectory.group_id for sample in samples]
    advantages = advantages_by(rewards, groups, by or LossSection())
    given = {"policy_version": 0, "token_budget": 40} | options
    return packed_within(samples, advantages, masked, **given)


class TinyModel(nn.Module):
    """One attention layer behind the interface of a Hugging Face causal model."""

    def __init__(self, seed=0, hidden=8):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB_SIZE, hidden)
        self.place = nn.Embedding(32, hidden)
        self.mix = nn.Linear(hidden, 3 * hidden)
        self.head = nn.Linear(hidden, VOCAB_SIZE, bias=False)

    def forward(self, input_ids, attention_mask, position_ids, use_cache):
        assert not use_cache
        x_BTH = self.embed(input_ids) + self.place(position_ids)
        q, k, v = (part[:, None] for part in self.mix(x_BTH).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return SimpleNamespace(logits=self.head(x_BTH + mixed[:, 0]))


def learned(training: Training, seeds: range) -> str:
    """The hash after a step for each seed."""
    for seed in seeds:
        training.learner.step(batch_of(random_samples(8, seed)))
    return weight_hash(training.learner.weights())
