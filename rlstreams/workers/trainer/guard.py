"""The guard: a check before each step that the sampler's weights are the trained ones.

Sampler and scorer give each token a log-prob under the *same* version. Sound engines differ by
rounding: 1e-5 nats a token in float32, up to 2e-2 in bfloat16. Weights under a wrong name, a cache
of older ones, another temperature or shifted tokens show there at once, and nowhere else: losses
stay finite, rewards plausible.

    learnt:   median over the first LEARN steps of the mean |scorer - sampler| over a batch's tokens
    usual:    the same over the last LEARN steps, but at least `learnt` and at most GROWN times it
    alarm if: a batch is above max(FLOOR, factor * usual), or by SURE standard errors a source of it
              ... above `limit`, whatever was learnt
              ... or one sample is above ONE_SAMPLE * limit

A *source* is a worker, or one of its servers, with one load of one version. Tokens behind a pull
within their sample are left out: a kept cache differs there by design.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import ScoredTrajectory, Segment
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.segments import is_sampled
from rlstreams.streams.tokens import SAMPLED
from rlstreams.workers.config.operation import GuardSection

MEAN = "mismatch_mean"  # name of the mean in a step's metrics
ALARM = "guard_alarm"  # 1 in those of a step for which there was an alarm
LEARN = 8  # steps: one batch moves the median of fewer; half of them may be faulty
GROWN = 3.0  # times: noise grows as the policy moves; a sampler left behind exceeds it
EARLY = 2.0  # times the factor while fewer are known: one batch may be three times another
FLOOR = 2e-3  # nats: less changes no importance weight by more than 0.2 %, and no learning
ONE_SAMPLE = 10.0  # times `limit`: no sound engine is so far off by chance, even in a short sample
FEWEST = 256  # tokens of a source: with fewer, a few of them decide its mean
SURE = 3.0  # standard errors: in 16 bits a few tokens, far apart, make most of a mean
FEWEST_OF_SAMPLE = 16
COARSE = ("kv-cache-dtype", "quantization")  # arguments of servers that coarsen by design
EXACT = ("", "auto", "float16", "bfloat16", "float32")
SHOWN = 4  # tokens of the worst sample in the alarm


def coarsened(args: Mapping[str, object]) -> str:
    """A sentence on the servers' arguments that may be all there is to an alarm; '' without any."""
    found = [f"engine.args.{name} = {args[name]}" for name in COARSE if name in args]
    found = [said for said in found if not said.endswith(tuple(f" = {one}" for one in EXACT))]
    if not found:
        return ""
    return f"{' and '.join(found)}: such servers differ from the scorer by design. "


class SegmentSource(NamedTuple):
    """Sampler of a segment: worker, engine and load."""

    worker: str
    engine: str  # with the server's address, if it has one
    policy_version: int
    load_id: str

    def __str__(self) -> str:
        load = f", load {self.load_id}" if self.load_id else ""
        return f"{self.worker} ({self.engine}) under version {self.policy_version}{load}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One segment of a sample, scored under the version that sampled it. N tokens."""

    sample: str
    source: SegmentSource
    ids_N: npt.NDArray[np.int32]
    sampler_N: npt.NDArray[np.float32]  # log-probs, nats
    scorer_N: npt.NDArray[np.float32]
    is_whole: bool  # of the whole distribution: without top_p and top_k, which the scorer ignores

    @property
    def distance_N(self) -> npt.NDArray[np.float32]:
        """Absolute difference of the two log-probs, nats."""
        distance: npt.NDArray[np.float32] = np.abs(self.scorer_N - self.sampler_N)
        return distance


def compared(samples: Iterable[ScoredTrajectory]) -> Iterator[Compared]:
    """Segments of a batch that can be compared."""
    for scored in samples:
        trajectory = scored.trajectory
        own = list(filter(is_sampled, trajectory.segments))
        for score in scored.scores:
            segment = trajectory.segments[score.segment]
            behavior = segment.behavior_logprobs
            is_first = bool(own) and segment.policy_version == own[0].policy_version
            if score.anchor != SAMPLED or not is_first or not len(segment.token_ids):
                continue
            assert behavior is not None, "validated"
            yield Compared(
                sample=sample_name(trajectory),
                source=_source(trajectory.worker, trajectory.engine, segment),
                ids_N=segment.token_ids.numpy(),
                sampler_N=behavior.numpy(),
                scorer_N=score.proximal_logprobs.numpy(),
                is_whole=segment.top_p >= 1 and segment.top_k == 0,
            )


def _source(worker: str, engine: str, segment: Segment) -> SegmentSource:
    return SegmentSource(worker, engine, segment.policy_version, segment.load_id)


def usual(steps: Sequence[float]) -> float:
    """The usual noise, nats: of the last steps, but within `GROWN` times that of the first.

    Args:
        steps: the mean of each step so far, at least one.
    """
    first, last = median(steps[:LEARN]), median(steps[-LEARN:])
    return min(max(first, last), GROWN * first)


def band(steps: Sequence[float], factor: float) -> float:
    """The largest mean that counts as noise, nats; infinite before the first step.

    Args:
        steps: the mean of each step so far.
    """
    if not steps:
        return math.inf
    early = EARLY if len(steps) < LEARN else 1.0
    return max(FLOOR, early * factor * usual(steps))


def alarm(parts: Sequence[Compared], steps: Sequence[float], by: GuardSection) -> str:
    """Problem of a batch, in a sentence or two; "": none."""
    if not parts:
        return ""
    is_whole = all(part.is_whole for part in parts)
    limit = by.limit if is_whole else math.inf
    most = min(limit, band(steps, by.factor))
    means = {source: _mean(own) for source, own in _by_source(parts).items()}
    enough = {
        source: _surely(own)
        for source, own in _by_source(parts).items()
        if sum(len(part.ids_N) for part in own) >= FEWEST
    }
    whole = _mean(parts)
    sample, of_sample, is_long = _worst_sample(parts)
    is_far = max([whole, *enough.values()]) > most
    is_sample_far = is_whole and is_long and of_sample > ONE_SAMPLE * by.limit
    if not (is_far or is_sample_far):
        return ""
    source = max(enough or means, key=lambda one: means[one])
    if not is_far:
        source = next(part.source for part in parts if part.sample == sample)
    why = f"{by.limit:g} is guard.limit"
    if most < limit:
        why = (
            f"{most:.2g} is {most / usual(steps):.3g} times that of the steps before"
            if (usual(steps) > 0 and most > FLOOR)
            else f"{FLOOR:g} is the least that counts"
        )
    others = [mean for one, mean in means.items() if one != source]
    beside = f"; all others {max(others):.2g} at most" if others else ""
    return (
        f"{source} does not sample with the weights that are scored: {means[source]:.2g} nats a "
        f"token between the log-probs of sampler and scorer under the same version, {whole:.2g} "
        f"over the batch ({why}){beside}. Worst sample {sample}: {of_sample:.2g} nats a token; "
        f"{_tokens(parts, sample)}"
    )


def _mean(parts: Iterable[Compared]) -> float:
    return float(np.concatenate([part.distance_N for part in parts]).mean(dtype=np.float64))


def _surely(parts: Iterable[Compared]) -> float:
    """Lower bound of the mean, by `SURE` standard errors."""
    distance_N = np.concatenate([part.distance_N for part in parts]).astype(np.float64)
    return float(distance_N.mean() - SURE * distance_N.std() / math.sqrt(len(distance_N)))


def _by_source(parts: Iterable[Compared]) -> Mapping[SegmentSource, list[Compared]]:
    found: dict[SegmentSource, list[Compared]] = {}
    for part in parts:
        found.setdefault(part.source, []).append(part)
    return found


def _worst_sample(parts: Sequence[Compared]) -> tuple[str, float, bool]:
    """The worst sample: its name, its mean, and whether it has enough tokens for one."""
    by_sample: dict[str, list[Compared]] = {}
    for part in parts:
        by_sample.setdefault(part.sample, []).append(part)
    long = {
        name: own
        for name, own in by_sample.items()
        if sum(len(part.ids_N) for part in own) >= FEWEST_OF_SAMPLE
    }
    means = {name: _mean(own) for name, own in (long or by_sample).items()}
    name = max(means, key=lambda one: means[one])
    return name, means[name], bool(long)


def _tokens(parts: Sequence[Compared], sample: str) -> str:
    own = [part for part in parts if part.sample == sample]
    distance_N = np.concatenate([part.distance_N for part in own])
    ids, sampler, scorer = (
        np.concatenate([getattr(part, name) for part in own])
        for name in ("ids_N", "sampler_N", "scorer_N")
    )
    tokens = [
        f"token {ids[at]}: {sampler[at]:.3f} and {scorer[at]:.3f}"
        for at in np.argsort(-distance_N, kind="stable")[:SHOWN]
    ]
    return ", ".join(tokens)


class Guard:
    """Checks each batch before its step, and keeps the means of the steps before."""

    def __init__(self, by: GuardSection) -> None:
        self._by = by
        self._steps: list[float] = []  # mean of each step, nats
        self._is_compared = False  # whether the batch looked at last had comparable tokens

    def learn(self, metrics: Mapping[str, float]) -> None:
        """Take a step's metrics, in order; also of steps in the log, after a restart. What there
        was an alarm for is no noise."""
        mean = metrics.get(MEAN)
        if mean is not None and not metrics.get(ALARM):
            self._steps.append(mean)

    def look(self, samples: Iterable[ScoredTrajectory]) -> str:
        """Problem of a batch; "": none, or the guard is off."""
        if self._by.action == "off":
            return ""
        parts = list(compared(samples))
        self._is_compared = bool(parts)
        return alarm(parts, self._steps, self._by)

    def look_behind(self, metrics: Mapping[str, float], version: int) -> str:
        """The same for a step that is done, if its log-probs were only computed in it."""
        if self._is_compared:
            return ""
        mean, most = metrics.get(MEAN), min(self._by.limit, band(self._steps, self._by.factor))
        if self._by.action == "off" or mean is None or mean <= most:
            return ""
        return (
            f"what sampled under version {version} does not have the weights that are trained: "
            f"{mean:.2g} nats a token between the log-probs of sampler and trainer under the same "
            f"version, and {most:.2g} is taken for noise"
        )

    @property
    def pauses(self) -> bool:
        """Whether an alarm pauses the run; else it only warns."""
        return self._by.action == "pause"
