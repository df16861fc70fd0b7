"""How many samples have come how far, and what waits between two roles. No broker is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES
from rlstreams.streams.samples.fold import Samples
from rlstreams.streams.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowState:
    """Samples so far, each once. What was scored lags a second behind, where no score is read."""

    issued: int = 0
    rolled_out: int = 0
    rolled_out_to_train: int = 0
    to_roll_out: int = 0  # of groups that are open, and held-out ones
    scorable: int = 0  # rolled out to train, and not set aside before the trainer
    scored: int = 0  # of those, as the log-prob workers count them
    closed: int = 0  # scorable, of groups that were trained or dropped
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
    """A snapshot. A trained sample was scored, whatever is left of the workers' reports."""
    counts = samples.counts
    counted = max(counts["scored"], int(workers.total("logprob", "samples")))
    names = ("issued", "rolled_out", "rolled_out_to_train", "to_roll_out", "scorable", "closed",
             "dead_at_rollout", "dead_at_logprob")  # fmt: skip
    scored = min(counts["scorable"], max(counts["closed"], counted))
    return FlowState(**{name: counts[name] for name in names}, scored=scored)


def oldest(samples: Samples, waiting: Mapping[str, int]) -> Mapping[str, int]:
    """Since when the training sample that waits longest in each topic does, ms since 1970; a topic
    in which none waits is missing.

    Who is scored is counted, and not read where no score is. So it is as if they were scored in the
    order in which they were sampled; and what is scored waits since it was sampled.

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
