"""Recordings that older releases made are read, audited and done again with this one.

`golden/recordings` has one for each generation of the wire, named by the commit whose `up` and
`record` made it: three steps of the demo, two groups of four samples each. To add one, take that
commit:

    sed '/^.demo.$/,$d' infra/examples/demo.toml > infra/examples/small.toml
    RLSTREAMS_HOST=recorder rlstreams up infra/examples/small.toml --run.id=small \\
        --trainer.steps=3 --trainer.groups_per_step=2 --trainer.checkpoint_every=2 \\
        --prompts.group_size=4 --prompts.evaluate_every=0 --data.held_out= --rollout.slots=8
    rlstreams record run runs/small --out tests/golden/recordings/COMMIT
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlstreams.debug.replay.player import recorded_config
from rlstreams.debug.rerun.rebuilt import steps_again
from rlstreams.schemas import decode
from rlstreams.schemas.events import ScoredTrajectory, StepCompleted, TrainerStarted, Trajectory
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.recording import Recording
from rlstreams.streams.recording.bus import RecordingBus
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.loop.agreement import judged_by
from rlstreams.workers.model.model import Numerics
from rlstreams.workers.trainer.facts import versions
from rlstreams.workers.trainer.family import differing
from tests.unit.roles.stand import EXAMPLE

MODEL = EXAMPLE.parent / "demo/model"
FOLDER = Path(__file__).parents[1] / "golden/recordings"
RELEASES = sorted(path.name for path in FOLDER.iterdir())
# Findings of a step that this machine's arithmetic decides, not what was recorded.
BY_ARITHMETIC = {"weights before", "loss", "gradient norm", "other figures", "weights after"}


def arithmetic() -> dict[str, str]:
    """What the last bit of a step depends on, as a claim names it."""
    here = versions(Numerics(threads=1, cpu_capability=torch.backends.cpu.get_cpu_capability()))
    return {name: here[name] for name in ("torch", "transformers", "machine", "cpu_capability")}


@pytest.mark.parametrize("release", RELEASES)
def test_every_record_is_read_and_every_sample_accounted_for(release: str) -> None:
    """Steps, samples, claim, with the values that the older release wrote."""
    with Recording(FOLDER / release) as recording:
        raws = [raw for raw in recording.records() if raw.value[:1] != b"{"]  # no schema's text
        kinds = Counter(type(decode(raw.value)) for raw in raws)
        (claim,) = (record.event for record in recording.events(TrainerStarted))
        samples = list(recording.events(ScoredTrajectory))
        assert (24, 24, 3) == tuple(kinds[k] for k in (Trajectory, ScoredTrajectory, StepCompleted))
        assert claim.versions["commit"].startswith(release)
        assert all(0 < len(one.event.trajectory.segments) for one in samples)
        found = audit(RecordingBus(recording), settle_s=0.0)
    assert found.ok
    assert (24, 24) == (found.issued, found.trained)


@pytest.mark.parametrize("release", RELEASES)
def test_an_upgrade_alone_changes_no_setting(release: str) -> None:
    """Fields that were removed since are none of its user's changes, nor are those that came."""
    with Recording(FOLDER / release) as recording:
        (claim,) = (record.event for record in recording.events(TrainerStarted))
        assert differing(claim.config, resolved_json(recorded_config(recording))) == []


def test_an_upgrade_alone_is_no_other_grader() -> None:
    """Samples before and behind it are trained together: fields that came since count for nothing
    at their default. (Older digests than this one were without agents.)"""
    with Recording(FOLDER / "b6229224") as recording:
        before = {record.event.judged_by for record in recording.events(Trajectory)}
        assert {judged_by(recorded_config(recording), {})} == before


@pytest.mark.parametrize("release", RELEASES)
def test_its_steps_are_done_again_to_the_bit(release: str) -> None:
    """Where arithmetic is the recorded one; elsewhere samples, order, masks and bytes are equal."""
    with Recording(FOLDER / release) as recording:
        (claim,) = (record.event for record in recording.events(TrainerStarted))
        config = recorded_config(recording)
        config = replace(config, model=replace(config.model, path=str(MODEL)))
        again = [
            (step.fact.step, {one.name for one in unequal})
            for step, unequal in steps_again(RecordingBus(recording), config)
        ]
    assert [1, 2, 3] == [step for step, _ in again]
    is_same = arithmetic().items() <= claim.versions.items()
    assert all(unequal <= (set() if is_same else BY_ARITHMETIC) for _, unequal in again)
