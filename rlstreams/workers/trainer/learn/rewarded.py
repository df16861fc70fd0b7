"""Advantages of a batch, by one of our estimators or by a function of the user's own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rlstreams.schemas.events import Segment, Trajectory
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.user_code import ADVANTAGE
from rlstreams.workers.sandbox.recorded import Code, own_functions
from rlstreams.workers.trainer.intake.groups import is_truncated
from rlstreams.workers.trainer.learn.advantage import Float32s, advantages_by


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedSample:
    """A sample of the batch, as an advantage of the user's own sees it."""

    group: str
    number: int  # in the group, from 0
    reward: float  # less the penalty for its length
    parts: Mapping[str, float]  # of the reward, by name
    turn_tokens: tuple[int, ...]  # tokens that the policy sampled, by turn, of all rows
    is_truncated: bool

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.turn_tokens)

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return len(self.turn_tokens)

    @classmethod
    def unread(cls, name: SampleId) -> RewardedSample:
        """A sample of which the log has no record any more."""
        group, number = name
        return cls(
            group=group, number=number, reward=0.0, parts={}, turn_tokens=(), is_truncated=False
        )

    @classmethod
    def of(cls, event: Trajectory, reward: float) -> RewardedSample:
        """A sample of the log, with this reward."""
        segments = event.segments
        return cls(
            group=event.group_id,
            number=event.sample,
            reward=reward,
            parts=dict(event.reward_parts),
            turn_tokens=tuple(
                sum(len(segment.token_ids) for segment in run)
                for author, run in itertools.groupby(segments, _author)
                if author == "policy"
            ),
            is_truncated=is_truncated(event),
        )


def _author(segment: Segment) -> str:
    return segment.author


class Advantages(NamedTuple):
    """Advantages of a batch."""

    of_samples: Float32s  # in batch order; with `of_tokens` their means
    of_tokens: tuple[Float32s, ...] = ()  # by sample, of each token that the policy sampled


def advantages_of(samples: Sequence[RewardedSample], by: LossSection, code: Code) -> Advantages:
    """Advantages as configured, by ours or by the user's function.

    Raises:
        OwnCodeError: the user's cannot be loaded, raised, or gave no finite number for a sample.
        ConfigError: rewards that `by.advantage` is not defined for.
    """
    if not by.has_own_advantage:
        rewards, groups = [one.reward for one in samples], [one.group for one in samples]
        return Advantages(advantages_by(rewards, groups, by))
    function = own_functions(by, code)[ADVANTAGE]
    found = function(tuple(samples), lambda err: isinstance(err, MemoryError))
    if isinstance(found, Mapping | set):  # of which only the keys would be read
        raise function.refused(f"gave {type(found).__name__}: give a list, in the samples' order")
    try:
        entries = [_numbers(one) for one in found]
    except (TypeError, ValueError, RuntimeError) as err:
        raise function.refused(f"gave {type(found).__name__}, not a sequence of numbers") from err
    if len(entries) != len(samples):
        raise function.refused(f"gave {len(entries)} advantages for {len(samples)} samples")
    for own, sample in zip(entries, samples, strict=True):
        name = SampleId(sample.group, sample.number)
        if own.shape not in ((), (sample.num_tokens,)):
            raise function.refused(
                f"gave an array of shape {own.shape} for sample {name}, which has "
                f"{sample.num_tokens} sampled tokens: give one number, or one for each of them"
            )
        if not np.isfinite(own).all():
            raise function.refused(f"gave {own[~np.isfinite(own)].flat[0]} for sample {name}")
    means = np.array([own.mean() if own.size else 0.0 for own in entries], np.float32)
    if not any(own.ndim for own in entries):
        return Advantages(means)
    if by.off_policy_max:
        raise function.refused(
            f"gave advantages of tokens, but trainer.loss.off_policy_max is {by.off_policy_max:g}, "
            "which needs one of the sample: set it to 0"
        )
    pairs = zip(entries, samples, strict=True)
    filled = (np.broadcast_to(own, (one.num_tokens,)).astype(np.float32) for own, one in pairs)
    return Advantages(means, tuple(filled))


def _numbers(value: Any) -> np.ndarray[Any, np.dtype[np.float64]]:  # noqa: ANN401
    if hasattr(value, "detach"):  # a tensor; torch is not imported for it
        value = value.detach().cpu().numpy()
    return np.asarray(value, np.float64)
