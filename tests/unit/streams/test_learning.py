"""Causes that are named for runs that do not learn: recorded ones, each wrong in its own way."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
SOUND = ("healthy0",)
FIRST: Mapping[str, tuple[int, str, str]] = {  # step, cause, and what its cure names
    "lr100": (3, "the policy moves too far", "lower trainer.optimizer.lr (now 0.02)"),
    "lr001": (16, "the policy hardly moves", "raise trainer.optimizer.lr (now 2e-06)"),
    "rare": (4, "nothing can be learnt", "or are the rows too hard?"),
    "half": (10, "most of a batch teaches nothing", "trainer.equal_rewards = 'drop'"),
    "trunc": (3, "answers are cut", "raise rollout.max_new_tokens (now 3)"),
    "clip1": (3, "many tokens are clipped", "raise trainer.loss.clip_low (now 1e-05)"),
    "trick": (12, "held-out rows get worse", "read the best answers"),
    "brief": (20, "one part of the reward is learnt at the cost of another", "reward.parts"),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_run_that_learns_has_no_hindrance(name: str) -> None:
    """At no step; three seeds of the demo."""
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
