"""What a resumed run may change."""

from __future__ import annotations

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.up.supervisor.up import changes
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RolloutSection, RunConfig, RunSection


def test_every_change_is_told() -> None:
    """Old and new value, by dotted name."""
    before = RunConfig()
    now = RunConfig(rollout=RolloutSection(slots=8))
    assert changes(resolved_json(before), resolved_json(now)) == [("rollout.slots", 64, 8)]
    assert changes(resolved_json(now), resolved_json(now)) == []


def test_another_seed_is_another_run() -> None:
    before, now = RunConfig(), RunConfig(run=RunSection(seed=5))
    with pytest.raises(ConfigError, match=r"run\.seed is 5, .* started with 0: restore it, or"):
        changes(resolved_json(before), resolved_json(now))
