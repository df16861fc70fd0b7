"""The search for samples of some steps that explain a change of a metric; writes nothing.

The steps are done again without a set of samples, and the metric is measured behind them. Random
sets of as many samples show how large an effect must be: noise is nobody's fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlstreams.debug.blame.evaluated import Evaluator, held_out_prompts
from rlstreams.debug.blame.experiments import Experiments, Gauge, advantages_of
from rlstreams.debug.blame.search import RANDOM_SETS, border, suspects
from rlstreams.debug.blame.series import DEFAULT, HELD_OUT, SAMPLED, is_reward, named, series
from rlstreams.debug.blame.sets import Batches, SampleSet, name_of, sets_of
from rlstreams.debug.rerun.rebuilt import Rebuilt, RerunError, rebuilt
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.streams.log.text import counted
from rlstreams.streams.run.run_log import RunLog
from rlstreams.words.spelling import Spelling
from rlstreams.words.texts import text_of
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.trainer.training.batch_metrics import batch_metrics

TABLE = 8  # sets that are tried alone and shown
_OF_TOKENS = ("mismatch", "rollout_")  # of recorded log-probs: no weights change them


@dataclass(frozen=True, slots=True, kw_only=True)
class BlamedSample:
    """A sample of a set, to be read."""

    sample: str
    step: int
    reward: float
    reward_instead: float | None  # another grader's; None: it was left out
    advantage: float
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect of one set of samples on the metric."""

    name: str
    samples: tuple[BlamedSample, ...]
    effect: float  # the metric with it, less the metric without it
    again: float | None  # the same with other draws of the evaluation; None: nothing is drawn
    share: float  # of the whole change; NaN: the metric did not change
    is_to_blame: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Blamed:
    """A metric's values with and without the samples, and the effects of the tried sets."""

    metric: str
    first: int
    last: int
    at: int
    now: float
    without: float  # the metric with none of the samples' updates, or with all the other rewards
    effects: tuple[Effect, ...]  # of the sets tried alone, the largest first
    random_effects: tuple[float, ...]  # of random sets of as many samples as the first one has
    border: float
    num_sets: int
    num_experiments: int
    num_steps: int  # steps done again
    started_from: str

    @property
    def to_blame(self) -> tuple[Effect, ...]:
        """Effects of the sets that stand out."""
        return tuple(one for one in self.effects if one.is_to_blame)


def blame(
    log: RunLog,
    config: RunConfig,
    steps: range,
    *,
    metric: str = "",
    by: str = "group",
    at: int = 0,
    rewards: Mapping[SampleId, float] | None = None,
    checkpoints: Sequence[Path] = (),
    spelled: Spelling,
    say: Callable[[str], None] = lambda _: None,
) -> Blamed:
    """Search the sets of these steps.

    Args:
        config: names the present places of model folder and verifier.
        steps: the steps whose samples may be left out.
        metric: "": the held-out reward if the run has one, else `DEFAULT`.
        by: the fact that samples are put into sets by, see `sets_of`.
        at: the step whose figure is measured, or behind which held-out rows are evaluated; steps
            behind the last are done as they were. 0: an evaluation's is the last, a figure's the
            one behind it, whose batch was sampled before.
        rewards: another grader's rewards, by sample; samples get these instead of being left out.

    Raises:
        ConfigError: no such metric, one that no sample's absence changes, or steps without such
            sets.
        RerunError, RetentionError, OffsetGoneError: a step cannot be done again.
    """
    known = series(log)
    name = named(metric or (HELD_OUT if HELD_OUT in known else DEFAULT), known)
    newest = max((point.step for own in known.values() for point in own), default=0)
    first, last = steps.start, min(steps.stop - 1, max(newest, steps.start))
    at = _measured_at(name, at, last, newest)
    with ExitStack() as stack:
        evaluator = None
        if name in SAMPLED:  # before the trainer's model: see `bisect`
            say("loads the model to evaluate with")
            evaluator = stack.enter_context(closing(Evaluator(config, held_out_prompts(log))))
        until = max(last, at)
        before = stack.enter_context(
            rebuilt(log.bus, config, first, until, checkpoints=checkpoints)
        )
        _check_steps(before, first, until)
        batches = {step: before.read(step) for step in range(first, until + 1)}
        _check_metric(name, at, last, batches)
        before.go_to(first - 1)
        gauge = Gauge(metric=name, at=at, evaluator=evaluator)
        work = Experiments(before=before, batches=batches, first=first, last=last, gauge=gauge,
                           rewards=rewards)  # fmt: skip
        sets = sets_of(by, batches, range(first, last + 1), log)
        work.begin()
        old = next((p.value for p in known[name] if p.step == first - 1), math.nan)
        return _Search(work, sets, spelled, say).run(old)


def _measured_at(name: str, at: int, last: int, newest: int) -> int:
    if at and at < last:
        raise ConfigError(f"--at {at} lies before the last of the steps, {last}")
    if at > newest:
        raise ConfigError(f"--at {at}: the log holds steps up to {newest}")
    return at or (last if name in SAMPLED else min(last + 1, max(newest, last)))


def _check_steps(before: Rebuilt, first: int, until: int) -> None:
    ledger = before.ledger
    if first <= ledger.drifted_step < until:
        raise RerunError(
            f"at step {ledger.drifted_step} the run went on with other weights than its log makes "
            "(RedoDrifted): name steps before it, or behind it with a checkpoint there"
        )
    if gone := [step for step in range(first, until + 1) if ledger.is_disowned(step)]:
        raise RerunError(f"step {gone[0]} was disowned by its trainer: name steps beside it")


def _check_metric(name: str, at: int, last: int, batches: Batches) -> None:
    """Check that leaving samples out can change the metric. Raises ConfigError: it cannot."""
    if name in SAMPLED:
        return
    if name in batch_metrics(batches[at][1]):
        raise ConfigError(
            f"--metric {name} is of samples as they were recorded, which no weights change: take "
            f"{HELD_OUT}, or `rlstreams inspect --step {at}`"
        )
    if name.startswith(_OF_TOKENS) and at > last:
        raise ConfigError(
            f"--metric {name} is of recorded log-probs, and no weights change those of step {at}: "
            f"measure it where the samples are, --at {last}"
        )


class _Search:
    """One search under way: its experiments, the sets to try, and the sets tried so far."""

    def __init__(
        self,
        work: Experiments,
        sets: Sequence[SampleSet],
        spelled: Spelling,
        say: Callable[[str], None],
    ) -> None:
        self._work, self._spelled, self._say = work, spelled, say
        self._names = work.names
        self._sets = [one for one in sets if one.samples & self._names]
        self._tried: set[frozenset[SampleId]] = set()
        self._toward = 1.0
        self._now = work.value(())
        if not math.isfinite(self._now):
            raise ConfigError(
                f"--metric {work.gauge.metric}: step {work.gauge.at} computes no such figure"
            )

    def run(self, old: float) -> Blamed:
        """Find the sets.

        Args:
            old: the metric at the step before, as recorded.
        """
        work, now = self._work, self._now
        is_own = work.gauge.evaluator is None and work.gauge.at == work.last
        without = old if is_own and work.rewards is None else self._value(self._names)
        rose = now - without if math.isfinite(without) else 1.0
        self._toward = -1.0 if is_reward(work.gauge.metric) else math.copysign(1.0, rose)
        ranked = suspects(self._sets, self._weight)[:TABLE]
        random_effects = self._random(ranked[0]) if ranked else []
        least = border(random_effects)
        effects = tuple(self._effect(one, least, now - without) for one in ranked)
        return Blamed(
            metric=work.gauge.metric,
            first=work.first,
            last=work.last,
            at=work.gauge.at,
            now=now,
            without=without,
            effects=effects,
            random_effects=tuple(random_effects),
            border=least,
            num_sets=len(self._sets),
            num_experiments=len(self._tried),
            num_steps=work.num_steps,
            started_from=work.before.started_from,
        )

    def _value(self, names: frozenset[SampleId]) -> float:
        self._tried.add(names)
        return self._work.value(names)

    def _weight(self, sets: Sequence[SampleSet]) -> float:
        """Return how far these sets moved the metric in the direction that is sought."""
        names = frozenset().union(*(one.samples for one in sets)) & self._names
        about = sets[0].name if len(sets) == 1 else f"{len(sets)} sets from {sets[0].name}"
        self._say(f"without {about} ({counted(len(self._tried), 'experiment')} so far)")
        return self._toward * (self._now - self._value(names))

    def _random(self, like: SampleSet) -> list[float]:
        """Return effects of random sets with as many samples that move the weights as `like`."""
        draw = np.random.default_rng(0)  # fixed, so that a second call gives the same
        moving = self._moving() - like.samples
        num = min(len(self._moving() & like.samples) or 1, len(moving) // 2)
        if not num:
            return []
        among = sorted(moving)
        picks = [
            frozenset(among[index] for index in draw.choice(len(among), num, replace=False))
            for _ in range(RANDOM_SETS)
        ]
        return [self._now - self._value(pick) for pick in picks]

    def _moving(self) -> frozenset[SampleId]:
        """Return the samples with an advantage; all samples, if none has one."""
        found = {
            name
            for step in range(self._work.first, self._work.last + 1)
            for name, value in advantages_of(self._work.batches[step][0]).items()
            if value
        }
        return frozenset(found & self._names) or self._names

    def _effect(self, one: SampleSet, least: float, whole: float) -> Effect:
        names = one.samples & self._names
        effect = self._now - self._value(names)
        is_to_blame, again = self._toward * effect > least, None
        if is_to_blame and self._work.gauge.evaluator is not None:
            again = self._work.value((), 1) - self._work.value(names, 1)
            is_to_blame = self._toward * again > least
        return Effect(
            name=one.name,
            samples=tuple(self._samples(names)),
            effect=effect,
            again=again,
            share=effect / whole if whole and math.isfinite(whole) else math.nan,
            is_to_blame=is_to_blame,
        )

    def _samples(self, names: frozenset[SampleId]) -> list[BlamedSample]:
        found, instead = [], self._work.rewards
        for step in range(self._work.first, self._work.last + 1):
            event, payloads = self._work.batches[step]
            advantages = advantages_of(event)
            for payload in payloads:
                name = name_of(payload)
                if name in names:
                    text = text_of(payload.scored.trajectory, self._spelled)
                    found.append(
                        BlamedSample(
                            sample=str(name),
                            step=step,
                            reward=text.reward,
                            reward_instead=None if instead is None else instead[name],
                            advantage=advantages[name],
                            prompt=text.prompt,
                            answer=text.answer,
                        )
                    )
        return sorted(found, key=lambda one: -abs(one.advantage))
