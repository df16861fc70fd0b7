"""What a resumed run may change."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.up.supervisor.up import changes, refuse_other_model
from rlstreams.workers.config.load import load, resolved_json
from rlstreams.workers.config.run import RolloutSection, RunConfig, RunSection
from rlstreams.workers.trainer.facts import hashes_of
from tests.factories import trainer_started
from tests.unit.roles.stand import EXAMPLE
from tests.unit.workers.test_standalone import edited


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


def test_another_model_is_refused_before_a_role_starts(tmp_path: Path) -> None:
    """By its weights or its tokenizer, whatever its folder is called; a copy elsewhere is not."""
    demo = EXAMPLE.parent / "demo/model"
    for name in ("copied", "trained", "retokenized"):
        shutil.copytree(demo, tmp_path / name)
    config = load([EXAMPLE])
    claim = trainer_started(config=resolved_json(config), hashes=hashes_of(config))
    edited(tmp_path / "trained")
    tokenizer = tmp_path / "retokenized" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text("utf-8") + "\n", encoding="utf-8")

    def with_model(name: str) -> RunConfig:
        return replace(config, model=replace(config.model, path=str(tmp_path / name)))

    for name in ("copied", "gone"):
        refuse_other_model(with_model(name), claim)
    for name, what in (("trained", "weights"), ("retokenized", "tokenizer")):
        was = f"started with {config.model.path} ({claim.hashes[what][:12]})"
        with pytest.raises(ConfigError, match=f"{name} .SHA-256 of its {what}: .*{re.escape(was)}"):
            refuse_other_model(with_model(name), claim)
    refuse_other_model(with_model("trained"), replace(claim, hashes={}))  # of an older release
