"""What a changed setting of a step that is done again may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.debug.rerun.rerun import changed_config
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.load import load

EXAMPLE = Path(__file__).parents[3] / "infra/examples/demo.toml"


def test_only_what_a_chosen_batch_computes_with_can_be_changed() -> None:
    """Anything else is refused with what can."""
    config = load([EXAMPLE])

    assert 0.3 == changed_config(config, ["trainer.loss.clip_high=0.3"]).trainer.loss.clip_high
    with pytest.raises(ConfigError, match=r"trainer.steps.*chosen already.*trainer.loss"):
        changed_config(config, ["trainer.steps=3"])
    with pytest.raises(ConfigError, match=r"did you mean trainer\.loss\.clip_high"):
        changed_config(config, ["trainer.loss.clip_hihg=3"])
