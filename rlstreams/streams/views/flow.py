"""Numbers of samples by progress, and of those that wait between two roles. Asks no broker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES
from rlstreams.streams.samples.fold import Samples
from rlstreams.streams.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowState:
    """Samples so far, each once. `scored` lags a second behind, where no score is read."""

    issued: int = 0
    rolled_out: int = 0
    to_roll_out: int = 0  # samples of open groups, and held-out ones
    scorable: int = 0  # rolled out to train, and not set aside before the trainer
    scored: int = 0  # scorable ones that the log-prob workers counted
    closed: int = 0  # scorable ones of groups that were trained or dropped
    dead_at_rollout: int = 0
    dead_at_logprob: int = 0

    @property
    def waiting(self) -> dict[str, int]:
        """Samples in each topic that its reader has not finished, by topic."""
        return {
            PROMPTS.name: self.to_roll_out,
            TRAJECTORIES.name: self.scorable - self.scored,
            SCORED.name: self.scored - self.closed,
        }


def flow(samples: Samples, workers: Workers) -> FlowState:
    """Return a snapshot. A trained sample counts as scored, even without its worker's reports."""
    counts = samples.counts
    counted = max(counts["scored"], int(workers.total("logprob", "samples")))
    names = ("issued", "rolled_out", "to_roll_out", "scorable", "closed",
             "dead_at_rollout", "dead_at_logprob")  # fmt: skip
    scored = min(counts["scorable"], max(counts["closed"], counted))
    return FlowState(**{name: counts[name] for name in names}, scored=scored)


def oldest(samples: Samples, waiting: Mapping[str, int]) -> Mapping[str, int]:
    """Return, by topic, the time since which its longest-waiting sample waits, ms since 1970.

    Only training samples count, and a topic without a waiting one is missing. Where no score is
    read, only the number of scored samples is known: they count as scored in the order in which
    they were sampled, and a scored sample waits since it was sampled.

    Args:
        waiting: `FlowState.waiting`.
    """
    issued, sampled = [], []
    for sample in samples.open:
        if sample.group.is_awaited(1 << sample.number):
            issued.append(sample.issued_at_ms)
        elif sample.is_rolled_out and not sample.is_dead:
            sampled.append(sample.at_ms)
    sampled.sort()
    num_unscored = min(len(sampled), waiting[TRAJECTORIES.name])
    num_scored = len(sampled) - num_unscored
    by_topic = {
        PROMPTS.name: issued,
        TRAJECTORIES.name: sampled[num_scored:],
        SCORED.name: sampled[:num_scored],
    }
    return {topic: min(times) for topic, times in by_topic.items() if times}


def cut_shares(samples: Samples) -> Mapping[int, float]:
    """Return the share of a step's answers that were cut at their length, by step; a step whose
    samples were not read is missing."""
    return {step: samples.truncated[step] / num for step, num in samples.known.items() if num}
