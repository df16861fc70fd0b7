"""Loading a folder, naming its weights, and putting others in their place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.folder import eos_ids_of, num_experts_of, read_config
from rlstreams.workers.model.model import (
    load_model,
    load_weights,
    weights_of,
)
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.layout import weight_hash

DEMO_MODEL = Path(__file__).parents[2] / "infra" / "examples" / "demo" / "model"


def edited(folder: Path, **config: object) -> Path:
    """A copy of the demo's folder with another `config.json`."""
    shutil.copytree(DEMO_MODEL, folder / "model")
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder / "model"


def test_the_demo_model_is_the_committed_one() -> None:
    """Its weights have one hash, however often they are loaded; experts are fused."""
    first, second = weights_of(load_model(DEMO_MODEL)), weights_of(load_model(DEMO_MODEL))
    assert weight_hash(first) == weight_hash(second)
    assert tuple(first["model.layers.0.mlp.experts.gate_up_proj"].shape) == (8, 128, 64)
    assert num_experts_of(read_config(DEMO_MODEL)) == 8
    assert eos_ids_of(DEMO_MODEL) == {2}


def test_weights_are_replaced_in_place_or_not_at_all() -> None:
    """One tensor that does not fit is named, and no other is touched."""
    model = load_model(DEMO_MODEL)
    before = weight_hash(weights_of(model))
    other = {name: tensor + 1 for name, tensor in weights_of(model).items()}
    with pytest.raises(
        WeightError, match=r"model.norm.weight should be float32 \[64\], is .*\[3\]"
    ):
        load_weights(model, {**other, "model.norm.weight": torch.zeros(3)})
    assert weight_hash(weights_of(model)) == before
    load_weights(model, other)
    assert weight_hash(weights_of(model)) == weight_hash(other)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
        ({"architectures": None}, "'architectures' is missing"),
    ],
)
def test_a_folder_that_is_no_model_is_named(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        load_model(edited(tmp_path, **config))
    assert str(tmp_path) in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json"):
        load_model(tmp_path)
    folder = edited(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=str(folder)):
        load_model(folder)


def test_a_weight_that_is_not_there_is_not_drawn_at_random(tmp_path: Path) -> None:
    """As transformers would, with a warning: each role would have another model."""
    folder = edited(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lacks 1 of the weights .* first model\.norm\.weight"):
        load_model(folder)
