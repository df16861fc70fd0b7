"""A project for GPUs, where the model decides what is written."""

from __future__ import annotations

from pathlib import Path

from rlstreams.__main__ import main
from rlstreams.workers.config.load import load
from rlstreams.workers.model.folder import read_config, token_limit

MODEL = Path(__file__).resolve().parents[3] / "infra/examples/demo/model"


def test_a_server_asks_for_no_more_than_the_model_has(tmp_path: Path) -> None:
    """vLLM refuses a sequence that is longer than the context of its model."""
    limit = token_limit(read_config(MODEL))
    assert limit < 4096
    words = ["--from", "gsm8k", "--gpus", "1", "--model", str(MODEL)]
    assert 0 == main(["init", str(tmp_path / "x"), *words])
    assert limit == load([tmp_path / "x/run.toml"]).engine.args["max-model-len"]
