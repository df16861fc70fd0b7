"""Recorded steps done again and again from one state, each time without other samples.

A sample left out adds nothing to the gradient; all else stays as it was: the others' advantages,
their divisors (`pack`, `left_out`), batch order and micro-batches. A step without any sample left
is passed over, as a run skips batches behind a spike of its loss (PaLM, arXiv 2204.02311, 5.1). So
without all samples the weights are those before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rlstreams.debug.blame.evaluated import Evaluator
from rlstreams.debug.blame.sets import Batches, name_of
from rlstreams.debug.rerun.rebuilt import Rebuilt
from rlstreams.debug.rerun.rerun import SavedState
from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.workers.loop.claims import claimed_config
from rlstreams.workers.model.cut import recorded_cut
from rlstreams.workers.trainer.intake.payloads import Payload
from rlstreams.workers.trainer.learn.step import NumericsError
from rlstreams.workers.trainer.redo.redo import train_recorded
from rlstreams.workers.trainer.training.training import Trained

STATES_BYTES = 2_000_000_000  # of weights and moments that are kept between steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A metric, and the step at which it is measured."""

    metric: str
    at: int  # the step whose figure it is; for an evaluation, the step behind which it is made
    evaluator: Evaluator | None = None  # None: the training computes it

    def read(self, steps: Rebuilt, trained: Trained | None, draws: int) -> float:
        """Return the value, from the weights in hand or from the figures of step `at`.

        Args:
            draws: number of the evaluation's set of random draws; 0: the run's own.
        """
        if self.evaluator is not None:
            version = steps.ledger.steps[self.at].policy_version + draws * 10**9
            weights = steps.training.learner.weights()
            return self.evaluator.evaluate(weights, version).value(self.metric)
        if trained is None:
            return math.nan
        return {**trained.metrics, "loss": trained.loss}.get(self.metric, math.nan)


@dataclass(slots=True, kw_only=True)
class Experiments:
    """Steps `first` to `last`, whose samples are left out, and the steps up to the gauge's."""

    before: Rebuilt  # at the step before `first`
    batches: Batches
    first: int
    last: int
    gauge: Gauge
    rewards: Mapping[SampleId, float] | None = None  # set instead of leaving samples out
    num_steps: int = 0  # steps done again so far
    _states: dict[int, SavedState] = field(default_factory=dict)
    _known: dict[tuple[frozenset[SampleId], int], float] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[SampleId]:
        """All samples that can be left out, or that `rewards` gives another reward."""
        steps = range(self.first, self.last + 1)
        names = frozenset(name_of(p) for step in steps for p in self.batches[step][1])
        if self.rewards is None:
            return names
        was = {name_of(p): p.scored.trajectory.reward
               for step in steps for p in self.batches[step][1]}  # fmt: skip
        return frozenset(n for n in names if self.rewards.get(n, was[n]) != was[n])

    def begin(self) -> None:
        """Do the steps unchanged, and keep states between them as far as there is room.

        Raises:
            RerunError: one gave other weights than recorded.
        """
        self._states[self.first - 1] = SavedState(self.before.training, self.first - 1)
        every = math.ceil((self.last - self.first) * self._states[self.first - 1].num_bytes
                          / STATES_BYTES) or 1  # fmt: skip
        trained: Trained | None = None
        for step in range(self.first, max(self.last, self.gauge.at) + 1):
            trained = self.before.go_to(step)
            self.num_steps += 1
            if step < self.last and (step - self.first + 1) % every == 0:
                self._states[step] = SavedState(self.before.training, step)
        self._known[frozenset(), 0] = self.gauge.read(self.before, trained, 0)

    def value(self, left_out: Collection[SampleId], draws: int = 0) -> float:
        """Return the gauge's value without these samples; NaN: it cannot be computed.

        Args:
            draws: see `Gauge.read`.
        """
        key = frozenset(left_out), draws if self.gauge.evaluator else 0
        if key not in self._known:
            self._known[key] = self._value(*key)
        return self._known[key]

    def _value(self, left_out: frozenset[SampleId], draws: int) -> float:
        training, trained = self.before.training, None
        steps = range(self.first, max(self.last, self.gauge.at) + 1)
        own = {step: {name_of(p) for p in self.batches[step][1]} for step in steps}
        touched = next((step for step in steps if own[step] & left_out), self.last + 1)
        begin = max(step for step in self._states if step < touched)
        self._states[begin].back()
        try:
            for step in range(begin + 1, steps.stop):
                if self.rewards is None and own[step] <= left_out:
                    training.pass_over()
                    trained = None
                    continue
                trained = self._train(step, left_out)
        except NumericsError:
            return math.nan
        return self.gauge.read(self.before, trained, draws)

    def _train(self, step: int, left_out: frozenset[SampleId]) -> Trained:
        event, payloads = self.batches[step]
        claim = self.before.ledger.claims[self.before.ledger.steps[step].epoch]
        self.num_steps += 1
        if self.rewards is not None:
            payloads = [self._judged(p) if name_of(p) in left_out else p for p in payloads]
            left_out = frozenset()
        section = claimed_config(claim).trainer
        given = self.before.training, section, claim.code, event, payloads, recorded_cut(event)
        return train_recorded(*given, left_out)

    def _judged(self, payload: Payload) -> Payload:
        trajectory, rewards = payload.scored.trajectory, self.rewards or {}
        reward = rewards.get(name_of(payload), trajectory.reward)
        scored = replace(payload.scored, trajectory=replace(trajectory, reward=reward))
        return replace(payload, scored=scored)


def advantages_of(event: StepCompleted) -> dict[SampleId, float]:
    """Return the recorded advantage of each sample."""
    return {SampleId.of(ref): ref.advantage for ref in event.samples}
