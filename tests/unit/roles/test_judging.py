"""What the engine is asked for, by the purpose of a prompt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlstreams.schemas.events import EVALUATE, Prompt
from rlstreams.workers.rollout.sampling import Sampler, sampling_of
from tests.fake_engine import FakeEngine
from tests.unit.roles.stand import Stand, make_prompt, make_sampler


def test_held_out_rows_are_sampled_as_they_are_to_be(tmp_path: Path) -> None:
    """Temperature and length of their own; training is as before."""
    stand = Stand(tmp_path)
    engine = FakeEngine(slots=4)
    asked = dataclasses.replace(
        stand.config.prompts, evaluate_temperature=0.0, evaluate_max_tokens=2
    )
    config = dataclasses.replace(stand.config, prompts=asked)
    sampler = dataclasses.replace(
        make_sampler(stand, engine),
        sampling=sampling_of(config.rollout),
        evaluation=sampling_of(config.evaluation),
    )
    train = make_prompt("0", 0, 1)
    evaluate = dataclasses.replace(train, group_id="e0-0", purpose=EVALUATE)
    assert (0.0, 2) == _asked_for(sampler, evaluate)
    usual = config.rollout
    assert (usual.temperature, usual.max_new_tokens) == _asked_for(sampler, train)


def _asked_for(sampler: Sampler, prompt: Prompt) -> tuple[float, int]:
    asked = sampler._sampling_of(prompt)
    return asked.temperature, asked.max_new_tokens
