"""Parts of a model folder that do not belong together, and what a model takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.check.doctor.check import EVERYTHING, Host, Level
from rlstreams.check.doctor.diagnose import _of_model
from rlstreams.check.doctor.model import model_checks, read_model
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.load import load

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "infra/examples/demo.toml"
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


def test_a_folder_whose_weights_are_of_another_form_or_of_fewer_layers(tmp_path: Path) -> None:
    """More layers than the configuration says may be of a head that is not loaded."""
    folder = copied(tmp_path, num_hidden_layers=3)
    assert "num_hidden_layers 3, but there are weights of 2: weights and" in refusal(folder)
    changed(folder / "config.json", num_hidden_layers=1)
    read_model(str(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin but no model.safetensors: `save_pretrained` of" in refusal(folder)


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
    ],
)
def test_a_model_that_cannot_be_computed_here(
    tmp_path: Path, config: dict[str, object], told: str
) -> None:
    """Known from `config.json`, before anything is loaded."""
    assert told in refusal(copied(tmp_path, **config))


def test_recurrent_layers_are_refused_where_the_built_in_engine_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server samples from such a model, and scorer and trainer compute it without a cache."""
    folder = copied(tmp_path, layer_types=["linear_attention", "full_attention"])
    model = read_model(str(folder))

    def failed(engine: str, host: Host) -> list[str]:
        config = load([DEMO], [f"--model.path={folder}", f"--rollout.engine={engine}"])
        return [c.found for c in _of_model(config, model, host) if c.level is Level.FAIL]

    (told,) = failed("builtin", EVERYTHING)
    assert told.startswith(f"rollout.engine is 'builtin', but layer_types in {folder}/config.json")
    assert "have a server sample (rollout.engine = 'vllm' or 'sglang')" in told
    assert [] == failed("builtin", Host(role="logprob"))
    assert [] == failed("vllm", EVERYTHING)
    assert 78 == main(["try", str(DEMO), f"--model.path={folder}"])
    assert "`rlstreams try` samples with the built-in engine, but" in capsys.readouterr().err


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
