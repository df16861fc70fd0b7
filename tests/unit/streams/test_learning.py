"""Causes that are named for runs that do not learn: recorded ones, each wrong in its own way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstreams.streams.views import learning
from rlstreams.streams.views.hindrance import LearningFacts
from rlstreams.streams.views.learning import hindrance, nothing_to_learn, stays
from tests.unit.streams.recorded_learning import point, said_of, states
from tests.unit.streams.simulated_learning import FAULT_AT, SHAPES, named_after

RESULTS = Path(__file__).parents[2] / "bench/results"
RUNS: Mapping[str, Any] = json.loads(
    (RESULTS / "hindrances-2026-11-28.json").read_text(encoding="utf-8")
)["runs"]
SOUND = ("healthy0", "healthy1", "healthy2", "temp2", "four", "slots1", "raises")
FIRST: Mapping[str, tuple[int, str, str]] = {  # step, cause, and what its cure names
    "lr100": (3, "the policy moves too far", "lower trainer.optimizer.lr (now 0.02)"),
    "lr10": (4, "the policy moves too far", "lower trainer.optimizer.lr (now 0.002)"),
    "lr001": (16, "the policy hardly moves", "raise trainer.optimizer.lr (now 2e-06)"),
    "rare": (9, "nothing can be learnt", "or are the rows too hard?"),
    "half": (10, "most of a batch teaches nothing", "trainer.equal_rewards = 'drop'"),
    "temp01": (10, "most of a batch teaches nothing", "raise rollout.temperature (now 0.05)"),
    "trunc": (3, "answers are cut", "raise rollout.max_new_tokens (now 3)"),
    "clip1": (3, "many tokens are clipped", "raise trainer.loss.clip_low (now 1e-05)"),
    "trunc2": (3, "answers are cut", "raise rollout.max_new_tokens (now 2)"),
    "hard": (3, "nothing can be learnt", "or are the rows too hard?"),
    "stale": (6, "the policy moves too far", "lower trainer.max_staleness (now 50)"),
    "trick": (12, "held-out rows get worse", "read the best answers"),
    "brief": (20, "one part of the reward is learnt at the cost of another", "reward.parts"),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_run_that_learns_has_no_hindrance(name: str) -> None:
    """At no step: seeds of the demo, and runs whose fault is another one."""
    assert [] == said_of(RUNS[name])


@pytest.mark.parametrize("name", FIRST)
def test_the_cause_is_said_early_and_with_what_to_set(name: str) -> None:
    """Of each recorded run: the first sentence, and the step that it is said after."""
    step, cause, cure = FIRST[name]
    said = said_of(RUNS[name])
    assert (step, cause) == (said[0][0], said[0][1].partition(":")[0])
    assert cure in said[0][1]


def test_a_collapse_stays_the_cause_when_its_steps_are_small_again() -> None:
    """At its end every answer is wrong and half are cut: both follow from the learning rate, and
    to ask whether the rows are too hard was wrong."""
    state = list(states(RUNS["lr100"]))[-1]
    found = hindrance(state)
    assert found is not None
    assert "the reward collapsed" == found.cause
    assert "in step 2 KL was 3.4 nats a token, the first above 0.1" in found.evidence
    assert min(state.cut[step] for step in (38, 39, 40)) > learning.CUT


def test_runs_of_a_pretrained_model_have_no_hindrance_but_their_control() -> None:
    """By rewards and held-out rows as they were written down of four runs on H100s, of which one
    stood still for 35 steps; the control, whose rewards are permuted, gets worse."""
    found = json.loads((RESULTS / "pretrained-h100-2026-11-27.json").read_text(encoding="utf-8"))
    said = {name: said_of(_as_recorded(run, name)) for name, run in found["runs"].items()}
    control = said.pop("control")
    assert {"seed0": [], "seed1": [], "seed2": []} == said
    assert [(42, "held-out rows get worse")] == [(n, text.partition(":")[0]) for n, text in control]
    assert control[0][1].endswith("trainer.control is permuted: such a run is not to learn")


def _as_recorded(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    rewards, num = run["reward"], len(run["reward"])
    return {
        "config": {"trainer.control": "permuted" if name == "control" else "none"},
        "num_samples": run["samples"],
        "reward": rewards,
        "metrics": {"reward_std": [(mean * (1 - mean)) ** 0.5 for mean in rewards]},
        "staleness": [1.0] * num,
        "cut": [0.0] * num,
        "dropped": [1] * num,
        "held_out": [[at["step"], *at["accuracy"]["all"]] for at in run["curve"]],
        "is_accuracy": True,
    }


def flat(num: int, **changes: Any) -> dict[str, Any]:
    """A run whose reward goes up and down around a quarter, with nothing else to be seen."""
    rewards = [0.25 + (0.03, -0.04, 0.01)[n % 3] for n in range(num)]
    return _as_recorded({"reward": rewards, "samples": 256, "curve": []}, "") | {
        "dropped": [0] * num,
        "held_out": [[0, 0.25, 256], [20, 0.24, 256], [40, 0.26, 256]],
        **changes,
    }


def test_a_reward_that_stays_is_said_after_sixty_steps() -> None:
    """With the likeliest reason; where held-out rows gain, or harder groups are left, with none."""
    ((step, said),) = said_of(flat(61))
    assert (60, "the reward does not rise") == (step, said.partition(":")[0])
    assert "raise trainer.optimizer.lr by 3" in said
    ((step, few),) = said_of(flat(121, num_samples=32))
    assert 120 == step, "as many samples as 60 steps of 64"
    assert "32 samples a step are mostly noise: raise trainer.groups_per_step" in few
    hot = said_of(flat(60, config={"rollout.temperature": 1.5}))[-1][1]
    assert "lower rollout.temperature (now 1.5)" in hot
    gains = [[0, 0.25, 256], [40, 0.4, 256]]
    assert [] == said_of(flat(60, held_out=gains))
    assert [] == said_of(flat(60, held_out=[], dropped=[1] * 60))


def test_a_policy_that_moves_too_far_is_told_of_its_old_samples_first() -> None:
    """And of each setting that makes a batch count more than once."""
    far = flat(3)
    far["metrics"]["kl"] = [0.0, 0.2, 0.2]
    config = {"trainer.max_staleness": 8, "trainer.minibatches": 4, "trainer.optimizer.lr": 1e-5}
    ((step, said),) = said_of(far | {"staleness": [4.0] * 3, "config": config})
    assert 3 == step
    assert (
        "lower trainer.max_staleness (now 8), then lower trainer.optimizer.lr (now 1e-05), to a "
        "third or less, then lower trainer.minibatches (now 4): --resume"
    ) in said
    far["metrics"]["kl"] = [0.0, 0.9, 0.01]
    assert [] == said_of(far), "one step of two may be chance"


def test_groups_are_alike_for_a_reason_that_entropy_tells() -> None:
    """A policy that became certain, one that never wavered, and few answers to a prompt."""
    alike = flat(10, config={"prompts.group_size": 2})
    alike["metrics"]["equal_reward_groups"] = [0.9] * 10

    def said(entropy: list[float]) -> str:
        alike["metrics"]["entropy"] = entropy
        return said_of(alike)[-1][1]

    assert "the policy became certain, entropy went from 0.6 to 0.001" in said(
        [0.6] * 3 + [1e-3] * 7
    )
    assert "raise rollout.temperature" in said([0.01] * 10)
    assert "raise prompts.group_size (now 2)" in said([0.6] * 10)
    solved = alike | {"reward": [0.99] * 10}
    solved["metrics"]["reward_std"] = [0.1] * 10
    assert [] == said_of(solved), "rows that are solved need no cure"


def test_replay_without_a_recorded_route_is_told() -> None:
    """Once no step of several had any: an answer may be without, and a run without replay says
    nothing of it."""
    (*_, state) = states(RUNS["healthy0"])

    def told(*recorded: float) -> str:
        last = state.run.steps[-len(recorded) :]
        steps = tuple(
            replace(step, metrics={**step.metrics, "routing_recorded": share})
            for step, share in zip(last, recorded, strict=True)
        )
        of_run = replace(state.run, steps=(*state.run.steps[: -len(recorded)], *steps))
        return str(hindrance(replace(state, run=of_run)) or "")

    assert "" == told(0.0, 0.4, 0.0) == told(0.0, 0.0)
    assert told(0.0, 0.0, 0.0).startswith("no route is replayed: in the last 3 steps")


def test_the_kind_of_run_decides_what_a_flat_reward_means() -> None:
    """A critic and a group of one compare with the batch, a teacher or a mere likelihood with no
    reward; without a comparison in its group a sample still teaches."""
    alike = flat(12) | {"reward": [0.25, 0.21, 0.26] * 4}
    alike["metrics"]["equal_reward_groups"] = [1.0] * 12
    assert "nothing can be learnt" in said_of(alike)[0][1]
    for advantage in ("gae", "reinforce++", "reward", "one", "mine.py:advantage"):
        assert [] == said_of(alike | {"config": {"trainer.loss.advantage": advantage}}), advantage
    constant = alike | {"reward": [0.5] * 61, "staleness": [1.0] * 61, "cut": [0.0] * 61}
    constant |= {"metrics": {"reward_std": [0.0] * 61}, "dropped": [0] * 61}
    assert (
        "rewarded with 0.5"
        in said_of(constant | {"config": {"trainer.loss.advantage": "gae"}})[0][1]
    )
    assert [] == said_of(constant | {"config": {"trainer.loss.advantage": "one"}})
    assert [] == said_of(flat(61, config={"trainer.loss.advantage": "one"})), "it need not rise"


@pytest.mark.parametrize(("scale", "zero"), [(1, 0), (1, -1), (2, -1), (300, -300), (1, 100)])
def test_solved_rows_are_known_wherever_the_zero_of_the_reward_is(scale: int, zero: int) -> None:
    """Seven answers of a hundred fail: to ask for other rows, or a higher rate, is wrong."""
    right = [(0.93, 0.90, 0.95, 0.91)[n % 4] for n in range(70)]
    run = flat(70) | {"reward": [scale * mean + zero for mean in right], "held_out": []}
    run["metrics"] = {
        "reward_std": [scale * (mean * (1 - mean)) ** 0.5 for mean in right],
        "equal_reward_groups": [0.85] * 70,
    }
    assert [] == said_of(run)


@pytest.mark.parametrize(("num_samples", "rewards"), [
    (16, [0.9] + [1.0] * 4 + [0.75, 0.8, 0.75, 0.75]),
    (4, [0.75, 1.0, 1.0, 0.75, 0.25, 0.25, 0.25]),
    (128, [0.97, 0.96, 0.87, 0.84, 0.85]),
])  # fmt: skip
def test_a_few_worse_steps_are_no_collapse(num_samples: int, rewards: list[float]) -> None:
    """The best of many steps had luck: of few samples, and of rows that are nearly solved."""
    run = flat(len(rewards), num_samples=num_samples) | {"reward": rewards, "held_out": []}
    run["metrics"] = {"reward_std": [(mean * (1 - mean)) ** 0.5 for mean in rewards],
                      "equal_reward_groups": [0.5] * len(rewards)}  # fmt: skip
    assert [] == said_of(run)
    lost = [0.5] * 20 + [0.0] * 20
    far = flat(40, num_samples=num_samples) | {"reward": lost, "held_out": []}
    far["metrics"]["reward_std"] = [(mean * (1 - mean)) ** 0.5 for mean in lost]
    assert any(text.startswith("the reward collapsed") for _, text in said_of(far))


def test_steps_without_a_signal_may_be_chance() -> None:
    """Four groups of four, of which most were alike before: three such steps prove nothing, and
    where all earned the most that was ever earned, all is learnt."""
    run = flat(40, num_samples=32) | {"reward": [0.9] * 10 + [0.8] * 30, "held_out": []}
    run["metrics"] = {"reward_std": [0.4] * 40, "equal_reward_groups": [0.75] * 10 + [1.0] * 30}
    (step, said), *_ = [one for one in said_of(run) if one[1].startswith("nothing")]
    assert 13 < step < 30
    assert "rewarded alike" in said
    learnt = run | {"reward": [0.9] * 10 + [1.0] * 30}
    learnt["metrics"] = run["metrics"] | {"reward_std": [0.3] * 10 + [0.0] * 30}
    assert [] == said_of(learnt)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["learns", "easy"])
def test_small_batches_that_learn_are_not_called_hopeless(kind: str, shape: str) -> None:
    """Of one to four groups a step many steps in a row have no signal, by chance; and the mean of
    ten of them is luck. `tests/bench/small_batches.py` asks 60 seeds each."""
    checks = (nothing_to_learn, stays)
    found = {seed: named_after(checks, kind, shape, seed, 1200) for seed in range(8)}
    assert {} == {seed: named for seed, named in found.items() if named}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "most"), [("hard", 384), ("lost", 160), ("certain", 160)])
def test_small_batches_without_a_signal_are_told_soon(kind: str, most: int, shape: str) -> None:
    """After as many samples as the demo needs: 48 groups of 8; earlier if groups had one before."""
    begin = 0 if kind == "hard" else FAULT_AT
    for seed in range(8):
        named = named_after((nothing_to_learn,), kind, shape, seed, begin + most)
        assert named["nothing_to_learn"] <= begin + most


@pytest.mark.parametrize(
    "config", [{"trainer": {"loss": {"advantage": "gae"}}}, {"prompts": {"group_size": 1}}]
)
def test_a_group_of_one_is_alike_and_no_sign_that_nothing_can_be_learnt(
    config: Mapping[str, object],
) -> None:
    """Four such groups a step, of a run that learns: three steps whose answers all earned the same
    are chance. A policy that is lost is told after as many samples as 128 groups of 8."""
    for seed in range(8):
        draw = np.random.default_rng(seed)
        right = [(draw.random(4) < 0.3 + n / 400).astype(float) for n in range(200)]
        right += [np.zeros(4)] * 256
        run = flat(len(right), num_samples=4, num_groups=4)
        run["reward"] = [float(own.mean()) for own in right]
        spreads = [float(own.std()) for own in right]
        run["metrics"] = {"reward_std": spreads, "equal_reward_groups": [1.0] * len(right)}
        steps = [point(run, number) for number in range(len(right))]
        facts = LearningFacts(steps=steps, held_out=[], measure="", cut={}, config=config)
        known = (replace(facts, steps=steps[:n]) for n in range(3, len(steps) + 1))
        found = [len(one.steps) for one in known if nothing_to_learn(one)]
        assert 200 < found[0] <= 456


def test_only_a_clip_that_cuts_gradients_is_told_with_its_own_setting() -> None:
    """Sequences of gspo are clipped on purpose, and cispo's tokens keep their gradient."""
    run = flat(4)
    run["metrics"]["clip_fraction"] = [0.3] * 4
    for kind in ("gspo", "cispo", "mine.py:loss"):
        assert [] == said_of(run | {"config": {"trainer.loss.kind": kind}}), kind
    config = {"trainer.loss.kind": "dppo", "trainer.loss.divergence_max": 0.01}
    assert "raise trainer.loss.divergence_max (now 0.01)" in said_of(run | {"config": config})[0][1]


def test_a_policy_that_stands_still_as_planned_is_no_fault() -> None:
    """While a critic warms up, and where the learning rate has fallen to its end."""
    run = flat(30)
    run["metrics"]["kl"] = [1e-9] * 30
    assert "hardly moves" in said_of(run)[0][1]
    assert [] == said_of(run | {"config": {"trainer.loss.value_warmup_steps": 20}})
    run["metrics"]["kl"] = [1e-4] * 15 + [1e-9] * 15
    assert [] == said_of(run)


def test_held_out_rows_that_get_worse_by_a_likelihood_are_no_fault_of_the_reward() -> None:
    """To mend a reward that nothing learns from was the wrong advice."""
    run = flat(20) | {"held_out": [[0, 0.42, 256], [10, 0.18, 256]]}
    assert "mend the reward" in said_of(run)[-1][1]
    said = said_of(run | {"config": {"trainer.loss.advantage": "one"}})[-1][1]
    assert said.startswith("held-out rows get worse")
    assert said.endswith("or the teacher, better than the policy? read some")
