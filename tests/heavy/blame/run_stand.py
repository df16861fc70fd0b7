"""A run in one process: a real trainer on an in-memory log, samples of the built-in engine, and, if
asked for, a group whose rewards are poisoned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from rlstreams.debug.blame.evaluated import Evaluator
from rlstreams.schemas.events import EVALUATE, Prompt, ScoredTrajectory, Segment, SegmentScore
from rlstreams.schemas.events import Tensor as TokenTensor
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import PROMPTS, TRAJECTORIES
from rlstreams.streams.run.run_log import BusLog
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.open import first_rows, prompt_encoder
from rlstreams.workers.engines.folder_channel import HeldWeights
from rlstreams.workers.prompts.issue import prompt_of
from rlstreams.workers.rollout.episode import Played
from tests import factories
from tests.heavy.trainer.trainer_stand import (
    make_config,
    make_log,
    make_trainer,
    run_steps,
    send,
    turn_until,
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog

SAMPLES = 8  # of a group
Poison = Callable[[ScoredTrajectory], ScoredTrajectory]
Weights = Mapping[str, Tensor]


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


def run_of(
    folder: Path,
    seed: int,
    *,
    steps: int,
    groups: int,
    evaluate_every: int = 0,
    held_out: int = 64,
    poisoned: int = 0,
    poison: Poison = lambda scored: scored,
    **overrides: object,
) -> Run:
    """Train for some steps, each on groups that the version before has sampled.

    Args:
        poisoned: the step of which `poison` changes the first group with several rewards; 0: none.
        evaluate_every: versions; 0: held-out rows are never answered.
    """
    config = make_config(
        folder,
        run__seed=seed,
        trainer__steps=steps,
        trainer__groups_per_step=groups,
        prompts__group_size=SAMPLES,
        **overrides,
    )
    log, bad = make_log(), ""
    encoder = prompt_encoder(config)
    every = first_rows(config.data, "data.train", steps * groups + held_out)
    prompts = [
        replace(prompt_of(row, encoder, seed, group_id=str(number), group_size=SAMPLES), row=number)
        for number, row in enumerate(every)
    ]
    training, held = prompts[: steps * groups], prompts[steps * groups :]
    trainer = make_trainer(log, config)
    turn_until(trainer, lambda: trainer._reporter.policy_version >= 0)
    with closing(Evaluator(config, [])) as engine:
        for step in range(1, steps + 1):
            weights = trainer._training.learner.weights()
            if evaluate_every and (step - 1) % evaluate_every == 0:
                evaluate(log, engine, weights, step - 1, held)
            own = training[(step - 1) * groups : step * groups]
            asked = [replace(p, sample=n) for p in own for n in range(SAMPLES)]
            played = sample(engine, weights, step - 1, asked)
            scored = [scored_of(p, one, step - 1) for p, one in zip(asked, played, strict=True)]
            if poisoned == step:
                bad = _mixed(scored)
                scored = [poison(s) if s.trajectory.group_id == bad else s for s in scored]
            send(log, *scored)
            run_steps(log, trainer, step)
        if evaluate_every and steps % evaluate_every == 0:
            evaluate(log, engine, trainer._training.learner.weights(), steps, held)
    turn_until(trainer, lambda: trainer.done)
    trainer.close()
    return Run(log=log, config=config, folder=folder, bad=f"group {bad}")


def _mixed(scored: Sequence[ScoredTrajectory]) -> str:
    """The first group that has advantages."""
    rewards: dict[str, set[float]] = {}
    for one in scored:
        rewards.setdefault(one.trajectory.group_id, set()).add(one.trajectory.reward)
    return next(group for group, own in rewards.items() if len(own) > 1)


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
    found = [scored_of(p, one, version).trajectory for p, one in zip(prompts, played, strict=True)]
    records = [outgoing(PROMPTS, p) for p in prompts] + [outgoing(TRAJECTORIES, t) for t in found]
    MemoryBus(log, "demo").producer(f"rollout.{version}").commit(records)


def scored_of(prompt: Prompt, played: Played, version: int) -> ScoredTrajectory:
    """As the roles write it: of this engine and trainer the log-probs are the same."""
    (turn,) = played.turns
    (made,) = turn.segments
    logprobs = TokenTensor.of(made.logprobs)
    trajectory = factories.trajectory(
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
                behavior_logprobs=logprobs,
                finish_reason=str(turn.finish_reason),
            ),
        ),
    )
    score = SegmentScore(
        segment=1, anchor="sampled", policy_version=version, proximal_logprobs=logprobs
    )
    return ScoredTrajectory(trajectory=trajectory, scores=(score,))


STEPS, BAD_STEP, GROUPS, ROWS = 12, 8, 4, 64
POISONS: Mapping[str, Poison] = {
    # A grader that gives points where it should take them, a hundred times as many.
    "inverted and scaled": lambda one: _judged(one, 100 * (1 - 2 * one.trajectory.reward)),
    # One that reads a number out of the answer.
    "length": lambda one: _judged(one, -100.0 * len(one.trajectory.segments[1].token_ids)),
}


def _judged(one: ScoredTrajectory, reward: float) -> ScoredTrajectory:
    return replace(one, trajectory=replace(one.trajectory, reward=reward))


def small_run(folder: Path, seed: int, poison: str = "") -> Run:
    """Twelve steps of four groups that learn fast; with a poison the eighth breaks it."""
    return run_of(
        folder,
        seed,
        steps=STEPS,
        groups=GROUPS,
        evaluate_every=4,
        held_out=ROWS,
        poisoned=BAD_STEP if poison else 0,
        poison=POISONS.get(poison, lambda one: one),
        trainer__checkpoint_every=4,
        store__url=folder / "store",
        store__anchor_every=5,
        trainer__loss__normalize_std="false",  # a reward of 100 is a hundred times as much
        trainer__optimizer__lr="1e-3",
        trainer__optimizer__max_grad_norm=1000.0,
    )
