"""Parts of a model folder that do not belong together, and what a model takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlstreams.check.doctor.check import Level
from rlstreams.check.doctor.model import model_checks, read_model
from rlstreams.streams.log.errors import ConfigError

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "infra/examples/demo/model"


def copied(folder: Path, **config: object) -> Path:
    """The demo's folder with another `config.json`; None removes a field."""
    shutil.copytree(MODEL, folder / "model")
    changed(folder / "model/config.json", **config)
    return folder / "model"


def changed(file: Path, **fields: object) -> None:
    merged = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_model(str(folder))
    assert str(caught.value).startswith("model.path: ")
    return str(caught.value)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    """Named; where there is one in another form, with the command that turns it into ours."""
    folder = copied(tmp_path)
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer (no tokenizer.json): copy the one" in refusal(folder)
    (folder / "tokenizer.model").touch()
    said = refusal(folder)
    assert "has tokenizer.model but no tokenizer.json; make it once:" in said
    assert f'save_pretrained(sys.argv[1])" {folder}' in said


def test_a_tokenizer_without_the_models_special_tokens(tmp_path: Path) -> None:
    """One of another model may have a smaller vocabulary, and so fit: it lacks the end."""
    folder = copied(tmp_path)
    changed(folder / "generation_config.json", eos_token_id=127)
    assert "the tokenizer ends a text with '<eos>' (2): they do not belong" in refusal(folder)
    changed(folder / "generation_config.json", eos_token_id=[2, 200])
    assert (
        "eos_token_id of the model is 200, and the tokenizer (128 tokens) has no such token"
        in refusal(folder)
    )


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "weights are quantized (mxfp4)"),
        ({"layer_types": ["full_attention", "conv"]}, "layer_types has conv; known are"),
        ({"layer_types": ["linear_attention"]}, "built-in engine's cache does not hold"),
    ],
)
def test_a_model_that_cannot_be_computed_here(
    tmp_path: Path, config: dict[str, object], told: str
) -> None:
    """Known from `config.json`, before anything is loaded."""
    assert told in refusal(copied(tmp_path, **config))


def test_how_it_will_be_computed_is_shown(tmp_path: Path) -> None:
    """Number format, attention, experts; where answers end, or that they never do."""
    checks = {check.name: check for check in model_checks(read_model(str(MODEL)))}
    assert "float32 (stored as F32), attention sdpa, 8 experts by grouped_mm" == (
        checks["numerics"].found
    )
    assert "end at '<eos>' (2)" == checks["answers"].found
    capped = read_model(str(copied(tmp_path, attn_logit_softcapping=30.0, eos_token_id=None)))
    (capped.path / "generation_config.json").unlink()
    found = {check.name: check for check in model_checks(read_model(str(capped.path)))}
    assert "attention eager" in found["numerics"].found
    assert Level.WARN is found["answers"].level
