"""Causes that are named for runs that do not learn: recorded ones, each wrong in its own way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlstreams.streams.views import learning
from rlstreams.streams.views.learning import hindrance
from tests.unit.streams.recorded_learning import said_of, states

RESULTS = Path(__file__).parents[2] / "bench/results"
RUNS: Mapping[str, Any] = json.loads(
    (RESULTS / "hindrances-2026-11-28.json").read_text(encoding="utf-8")
)["runs"]
SOUND = ("healthy0", "healthy1", "healthy2", "temp2", "four", "slots1", "raises")
FIRST: Mapping[str, tuple[int, str, str]] = {  # step, cause, and what its cure names
    "lr100": (3, "the policy moves too far", "lower trainer.optimizer.lr (now 0.02)"),
    "lr10": (4, "the policy moves too far", "lower trainer.optimizer.lr (now 0.002)"),
    "lr001": (16, "the policy hardly moves", "raise trainer.optimizer.lr (now 2e-06)"),
    "rare": (4, "nothing can be learnt", "or are the rows too hard?"),
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
    few = said_of(flat(60, num_samples=4))[-1][1]
    assert "4 samples a step are mostly noise: raise trainer.groups_per_step" in few
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
