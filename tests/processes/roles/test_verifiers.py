"""A verifier that misbehaves, in the role that calls it: only its own samples pay for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rlstreams.schemas.events import DeadLetter, Trajectory
from rlstreams.streams.log.topics import DEAD_LETTERS, TRAJECTORIES
from rlstreams.workers.config.reward import RewardSection
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.rollout.worker import make_worker
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import FakeEngine
from tests.unit.roles.stand import Stand, make_sampler, turn_until

GRADE = """
import time

def grade(prompt, completion, answer, metadata):
    if answer == "hang":
        time.sleep(3600)
    if answer == "raise":
        raise KeyError("x")
    return {"right": 1.0, "form": 0.5}
"""


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("hang", r"grade.py:6"),
        ("raise", "grade.py:8: grade raised KeyError: 'x'"),
    ],
)
def test_it_costs_its_samples(tmp_path: Path, answer: str, told: str) -> None:
    """They are set aside with file and line; those before and behind them are trained on."""
    file = tmp_path / "grade.py"
    file.write_text(GRADE)
    section = RewardSection(
        verifier=f"{file}:grade",
        timeout_s=0.5 if answer == "hang" else 60.0,
        processes=1,
        require_stop=False,
    )
    stand = Stand(tmp_path)
    stand.publish(0)
    context, engine = stand.context("rollout"), FakeEngine(step_s=0.0, slots=8)
    sampler = dataclasses.replace(make_sampler(stand, engine), verifier=make_verifier(section))
    rollout = make_worker(context, context.bus, engine, FileWeightChannel(), sampler)
    for group, wanted in enumerate(("fine", answer, "fine")):
        stand.issue(str(group), 1, answer=wanted)

    def judged() -> list[Trajectory]:
        return stand.read(TRAJECTORIES.name, Trajectory)

    def letters() -> list[DeadLetter]:
        return stand.read(DEAD_LETTERS.name, DeadLetter)

    turn_until(rollout, lambda: len(judged()) + len(letters()) == 3)
    rollout.close()
    assert {"0", "2"} == {t.group_id for t in judged()}
    assert [{"right": 1.0, "form": 0.5}] * 2 == [t.reward_parts for t in judged()]
    assert [1.5] * 2 == [t.reward for t in judged()]
    assert [("1", "reward", False)] == [(d.group_id, d.reason, d.permanent) for d in letters()]
    assert told in letters()[0].detail
