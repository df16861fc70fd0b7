"""Every open group is dropped at once: pacing and planner do not wait for each other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from rlstreams.schemas.events import TRAIN, Prompt, RedoDrifted
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import PROMPTS, SCORED
from rlstreams.workers.trainer.intake.admission import Admission
from rlstreams.workers.trainer.intake.groups import PolicySegment, SeenSample
from tests.factories import groups_dropped, redo_drifted, step_completed
from tests.unit.prompts.world import World, started, ticks

STEPS = 6
MAX_TICKS = 100
OnStale = Literal["mask", "drop"]


class Loop:
    """The real `prompts` worker and the real planner; between them samples are answered at once."""

    def __init__(self, folder: Path, max_staleness: int, on_stale: OnStale) -> None:
        self.world = World(folder)
        config = self.world.config
        section = dataclasses.replace(
            config.trainer, steps=STEPS, max_staleness=max_staleness, on_stale=on_stale
        )
        self.world.config = dataclasses.replace(config, trainer=section)
        self.admission = Admission(section)
        self.version = self.num_steps = self.num_dropped = 0
        self._offset = 0
        self._prompts = self.world.bus.reader(self.world.bus.beginnings(PROMPTS.name))
        self.world.says(started(step_target=STEPS))
        self.worker = self.world.worker()

    def answer(self) -> None:
        """Each new sample is rolled out and scored under the newest version."""
        ticks(self.worker, 1)
        for raw in self._prompts.poll(1000, 0.0):
            event = decoded(raw).event
            if isinstance(event, Prompt) and event.purpose == TRAIN:
                assert event.min_policy_version <= self.version
                self.admission.add(self._seen(event), 0.0)

    def drift(self) -> None:
        """A new version number without a step, as a redo on other hardware gives."""
        self.version += 1
        event: RedoDrifted = redo_drifted(epoch=1, policy_version=self.version)
        self.world.says(event)

    def train(self) -> None:
        """Drops first, then at most one step: what the trainer does in a tick."""
        groups = self.admission.drops(self.version, 1.0)
        if groups:
            ids = [group.group_id for group in groups]
            closed = self.admission.closed_after(ids)
            self.world.says(groups_dropped(groups=tuple(groups), closed=closed))
            self.admission.close(ids)
            self.num_dropped += len(groups)
        plan = self.admission.plan(self.version)
        if plan is None:
            return
        assert not plan.masked
        self.num_steps += 1
        self.version += 1
        closed = self.admission.closed_after(plan.group_ids)
        self.world.says(step_completed(self.num_steps, policy_version=self.version, closed=closed))
        self.admission.close(plan.group_ids)

    def _seen(self, prompt: Prompt) -> SeenSample:
        self._offset += 1
        return SeenSample(
            group_id=prompt.group_id,
            sample=prompt.sample,
            group_size=prompt.group_size,
            purpose=prompt.purpose,
            row=prompt.row,
            dataset_epoch=prompt.dataset_epoch,
            replacement=prompt.replacement,
            position=Position(SCORED.name, 0, self._offset),
            num_tokens=8,
            segments=(PolicySegment(1, self.version),),
        )


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("on_stale", ["mask", "drop"])
def test_a_window_that_is_dropped_whole_is_issued_again(
    tmp_path: Path, max_staleness: int, on_stale: OnStale
) -> None:
    """Before the first, the third and the last step all open groups become too stale at once."""
    loop = Loop(tmp_path, max_staleness, on_stale)
    window = (max_staleness + 1) * 3
    drift_before = {0, 2, STEPS - 1}
    for _ in range(MAX_TICKS):
        loop.answer()
        if loop.num_steps in drift_before and loop.admission.num_open_groups:
            drift_before.remove(loop.num_steps)
            for _ in range(max_staleness + 1):
                loop.drift()
        loop.train()
        assert loop.admission.num_open_groups <= window
        if loop.num_steps == STEPS:
            break
    loop.answer()
    loop.worker.close()
    groups = loop.world.groups()
    assert STEPS == loop.num_steps
    assert loop.num_dropped >= 2 * window
    replacing = [samples[0].replaces for samples in groups.values() if samples[0].replaces]
    assert loop.num_dropped == len(replacing) == len(set(replacing))
    assert STEPS * 3 + loop.num_dropped == loop.admission.closed.watermark == len(groups)
