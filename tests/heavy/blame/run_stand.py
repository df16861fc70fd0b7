"""A run in one process: a real trainer on an in-memory log, samples of the built-in engine, scores
of the real scorer, and, if asked for, a group that is poisoned."""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from rlstreams.debug.blame.evaluated import Evaluator
from rlstreams.schemas.events import (
    EVALUATE,
    Prompt,
    ScoredTrajectory,
    Segment,
    Trajectory,
)
from rlstreams.schemas.events import Tensor as TokenTensor
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES
from rlstreams.streams.run.run_log import BusLog
from rlstreams.workers.bootstrap.parts import make_scorers
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.open import first_rows, prompt_encoder
from rlstreams.workers.engines.base import Scorer
from rlstreams.workers.engines.folder_channel import HeldWeights
from rlstreams.workers.logprob.scoring import score_window
from rlstreams.workers.logprob.versions import Anchor
from rlstreams.workers.prompts.issue import prompt_of
from rlstreams.workers.rollout.episode import Played
from tests import factories
from tests.heavy.trainer.trainer_stand import (
    make_config,
    make_log,
    make_trainer,
    run_steps,
    tick_until,
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog

SAMPLES = 8  # of a group
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """What is wrong with a group."""

    change: Callable[[Sequence[Trajectory]], Sequence[Trajectory]]  # of its samples
    is_scored: bool = True  # False: the change is made behind the scorer
    lasts: bool = False  # of all groups from that step on


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was made."""

    log: MemoryLog
    config: RunConfig
    folder: Path
    bad: str  # the set that is poisoned

    def opened(self) -> BusLog:
        """As commands open it."""
        return BusLog(MemoryBus(self.log, "demo"), "demo")


class Stand:
    """A run under way: each step is trained on groups that the version before has sampled.

    Args:
        steps: of the whole run.
        evaluate_every: versions; 0: held-out rows are never answered.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        steps: int,
        groups: int,
        evaluate_every: int = 0,
        held_out: int = 64,
        **overrides: object,
    ) -> None:
        self.config = make_config(
            folder,
            run__seed=seed,
            trainer__steps=steps,
            trainer__groups_per_step=groups,
            prompts__group_size=SAMPLES,
            **overrides,
        )
        self.folder, self.log, self.bad = folder, make_log(), ""
        self._groups, self._evaluate_every = groups, evaluate_every
        encoder = prompt_encoder(self.config)
        every = first_rows(self.config.data, steps * groups + held_out)
        self._prompts = [
            replace(prompt_of(r, encoder, seed, group_id=str(n), group_size=SAMPLES), row=n)
            for n, r in enumerate(every)
        ]
        self._held_out = self._prompts[steps * groups :]
        self._begin("one")

    def _begin(self, instance: str) -> None:
        self._trainer = make_trainer(self.log, self.config, instance, takeover=instance != "one")
        tick_until(self._trainer, lambda: self._trainer._reporter.policy_version >= 0)
        self._scorer, _ = make_scorers(self.config)

    def fork(self, folder: Path) -> Stand:
        """Another one that goes on from copies of its log and of its checkpoints."""
        for made in (self.folder / "checkpoints").glob(
            "[0-9]*/manifest.json"
        ):  # the last file of each
            shutil.copytree(made.parent, folder / "checkpoints" / made.parent.name)
        other = copy.copy(self)
        other.folder, other.log = folder, copied(self.log)
        other.config = replace(self.config, run=replace(self.config.run, dir=str(folder)))
        other._begin("two")
        return other

    def go_on(self, to: int, poisoned: int = 0, poison: Poison | None = None) -> None:
        """Make the steps up to `to`.

        Args:
            poisoned: the step of which `poison` changes the first group with several rewards, or
                from which on it changes all, if it lasts.
        """
        with closing(Evaluator(self.config, [])) as engine:
            for step in range(self._trainer._training.learner.step_number + 1, to + 1):
                self._evaluate(engine, step - 1)
                is_poisoned = step == poisoned or (poison and poison.lasts and step > poisoned)
                self._step(engine, step, poison if is_poisoned else None)
            if to == self.config.trainer.steps:
                self._evaluate(engine, to)

    def run(self) -> Run:
        """What was made; the trainer is closed."""
        if self._trainer._training.learner.step_number == self.config.trainer.steps:
            tick_until(self._trainer, lambda: self._trainer.done)
        self._trainer.close()
        return Run(log=self.log, config=self.config, folder=self.folder, bad=f"group {self.bad}")

    def _step(self, engine: Evaluator, step: int, poison: Poison | None) -> None:
        weights = self._trainer._training.learner.weights()
        own = self._prompts[(step - 1) * self._groups : step * self._groups]
        asked = [replace(p, sample=n) for p in own for n in range(SAMPLES)]
        played = sample(engine, weights, step - 1, asked)
        made = [finished(p, one, step - 1) for p, one in zip(asked, played, strict=True)]
        behind = made
        if poison is not None:
            self.bad = "" if poison.lasts else _mixed(made)
            behind = with_poison(made, self.bad, poison)
            made = behind if poison.is_scored else made
        scored = scores(self._scorer, weights, step - 1, made)
        trained = [replace(s, trajectory=t) for s, t in zip(scored, behind, strict=True)]
        commit(self.log, asked, made, trained)
        run_steps(self.log, self._trainer, step)

    def _evaluate(self, engine: Evaluator, version: int) -> None:
        if self._evaluate_every and version % self._evaluate_every == 0:
            weights = self._trainer._training.learner.weights()
            evaluate(self.log, engine, weights, version, self._held_out)


def copied(log: MemoryLog) -> MemoryLog:
    """The same records at the same places."""
    other = MemoryLog()
    with log.changed:
        other.cluster_id = log.cluster_id
        other._topics, other._epochs = copy.deepcopy((log._topics, log._epochs))
    return other


def _mixed(made: Sequence[Trajectory]) -> str:
    """The first group that has advantages."""
    rewards: dict[str, set[float]] = {}
    for one in made:
        rewards.setdefault(one.group_id, set()).add(one.reward)
    return next(group for group, own in rewards.items() if len(own) > 1)


def with_poison(made: Sequence[Trajectory], bad: str, poison: Poison) -> list[Trajectory]:
    """The same samples; those of group `bad` are poisoned, or of "" all."""
    changed = iter(poison.change([one for one in made if one.group_id == (bad or one.group_id)]))
    return [next(changed) if one.group_id == (bad or one.group_id) else one for one in made]


def commit(
    log: MemoryLog,
    prompts: Sequence[Prompt],
    made: Sequence[Trajectory],
    scored: Sequence[ScoredTrajectory],
) -> None:
    """Samples as the roles write them."""
    records = [outgoing(PROMPTS, p) for p in prompts] + [outgoing(TRAJECTORIES, t) for t in made]
    MemoryBus(log, "demo").producer("roles").commit(records + [outgoing(SCORED, s) for s in scored])


def scores(
    scorer: Scorer, weights: Weights, version: int, made: Sequence[Trajectory]
) -> list[ScoredTrajectory]:
    """Scored as the log-prob role does it."""
    source = HeldWeights(dict(sorted(weights.items())), "policy", version)
    for held in scorer.versions:
        scorer.drop(held)
    scorer.pull(source.published, source)
    anchors = {version: Anchor(label="sampled", policy_version=version)}
    found = score_window(made, anchors, {}, scorer)
    return [ScoredTrajectory(trajectory=t, scores=s) for t, s in zip(made, found, strict=True)]


def sample(
    engine: Evaluator, weights: Weights, version: int, prompts: Sequence[Prompt]
) -> list[Played]:
    """An answer to each, judged."""

    async def answers() -> list[Played]:
        source = HeldWeights(dict(sorted(weights.items())), "policy", version)
        await engine._engine.pull(source.published, source)
        return list(await asyncio.gather(*map(engine._sampler.played, prompts)))

    return engine._loop.wait(answers(), 120.0, "samples")


def evaluate(
    log: MemoryLog, engine: Evaluator, weights: Weights, version: int, rows: Sequence[Prompt]
) -> None:
    """Held-out rows, issued and answered."""
    prompts = [
        replace(p, group_id=f"e{version}-{p.row}", group_size=1, purpose=EVALUATE) for p in rows
    ]
    played = sample(engine, weights, version, prompts)
    found = [finished(p, one, version) for p, one in zip(prompts, played, strict=True)]
    records = [outgoing(PROMPTS, p) for p in prompts] + [outgoing(TRAJECTORIES, t) for t in found]
    MemoryBus(log, "demo").producer(f"rollout.{version}").commit(records)


def finished(prompt: Prompt, played: Played, version: int) -> Trajectory:
    """As the role writes it."""
    (turn,) = played.turns
    (made,) = turn.segments
    return factories.trajectory(
        group_id=prompt.group_id,
        sample=prompt.sample,
        group_size=prompt.group_size,
        purpose=prompt.purpose,
        row=prompt.row,
        worker=f"rollout-{prompt.sample % 2}",
        reward=played.judgement.reward,
        segments=(
            Segment(author="prompt", token_ids=prompt.token_ids),
            Segment(
                author="policy",
                token_ids=TokenTensor.of(made.token_ids),
                policy_version=version,
                behavior_logprobs=TokenTensor.of(made.logprobs),
                finish_reason=str(turn.finish_reason),
            ),
        ),
    )


STEPS, BAD_STEP, GROUPS, ROWS = 12, 8, 4, 64
SHORT = 7  # tokens of an answer
VOCABULARY = 100  # of the demo's tokens, those that can be sampled


def with_reward(reward: Callable[[Trajectory], float]) -> Poison:
    """Samples that another grader judged."""
    return Poison(change=lambda made: [replace(one, reward=reward(one)) for one in made])


def _is_short(one: Trajectory) -> bool:
    return len(one.segments[1].token_ids) <= SHORT


def _swapped(made: Sequence[Trajectory]) -> list[Trajectory]:
    """Each with other tokens, whose log-probs are said to be those of its own."""
    draw = np.random.default_rng(0)

    def swapped(one: Trajectory) -> Trajectory:
        prompt, own = one.segments
        ids = draw.integers(4, VOCABULARY, len(own.token_ids)).astype(np.int32)
        return replace(one, segments=(prompt, replace(own, token_ids=TokenTensor.of(ids))))

    return [swapped(one) for one in made]


POISONS: Mapping[str, Poison] = {
    "rewards inverted": with_reward(lambda one: 1 - one.reward),
    # A grader that gives points where it should take them, a hundred times as many.
    "inverted and scaled": with_reward(lambda one: 100 * (1 - 2 * one.reward)),
    # One that reads a number out of the answer.
    "length": with_reward(lambda one: -100.0 * len(one.segments[1].token_ids)),
    # One of which the policy can find a hole: it takes whatever is short for right.
    "a hole": replace(with_reward(lambda one: max(one.reward, float(_is_short(one)))), lasts=True),
    "tokens swapped": Poison(change=_swapped),
    "tokens swapped behind the scorer": Poison(change=_swapped, is_scored=False),
}


def demo(folder: Path, seed: int, *, steps: int = 60, **overrides: object) -> Stand:
    """The demo: steps of sixteen groups, an evaluation each ten."""
    options: dict[str, object] = {"trainer__checkpoint_every": 10, **overrides}
    return Stand(folder, seed, steps=steps, groups=16, evaluate_every=10, held_out=256, **options)


def small_run(folder: Path, seed: int, poison: str = "") -> Run:
    """Twelve steps of four groups that learn fast; with a poison the eighth breaks it."""
    stand = Stand(
        folder,
        seed,
        steps=STEPS,
        groups=GROUPS,
        evaluate_every=4,
        held_out=ROWS,
        trainer__checkpoint_every=4,
        store__url=folder / "store",
        store__anchor_every=5,
        trainer__loss__normalize_std="false",  # a reward of 100 is a hundred times as much
        trainer__optimizer__lr="1e-3",
        trainer__optimizer__max_grad_norm=1000.0,
    )
    stand.go_on(STEPS, BAD_STEP if poison else 0, POISONS.get(poison))
    return stand.run()
