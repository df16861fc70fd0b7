"""A checkpoint as a Hugging Face folder: the same model for everybody else, or none at all."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from rlstreams.show.export.model import export_model
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.config.trainer import LoraSection
from rlstreams.workers.engines.builtin import BuiltinEngine
from rlstreams.workers.model.model import load_model, load_weights, weights_of
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from rlstreams.workers.weights.layout import weight_hash
from tests import factories, families
from tests.contract.engine_rigs import announced, collect, driven, request
from tests.heavy.test_lora import LORA, learned, training
from tests.logs import made_log
from tests.memory.bus import MemoryBus

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own
# Plain; tied; experts that are fused when loaded, under two naming schemes.
FAMILIES = ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """A run of two steps with a checkpoint of the second one."""

    bus: MemoryBus
    folder: Path
    model: Path
    manifest: Manifest
    weights: dict[str, torch.Tensor]

    def export(self, **given: Any) -> Any:
        return export_model(self.bus, self.folder, self.model, self.folder / "out", **given)


def stand(folder: Path, name: str, lora: LoraSection = LORA) -> Stand:
    model = families.make(name, folder / "model")
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    trained = training(model, lora)
    began, made = trained.model_hash, learned(trained, range(2))
    manifest = Manifest(run="r", epoch=1, step=2, policy_version=2, weight_hash=made)
    trained.save(CheckpointStore(folder / "checkpoints"), manifest)
    log = made_log("r")
    bus = MemoryBus(log, "r")
    events = [
        factories.trainer_started(run="r", epoch=1, hashes={"model": began}),
        *(
            factories.step_completed(step=n, epoch=1, policy_version=n, weight_hash=h)
            for n, h in ((1, "a" * 64), (2, made))
        ),
    ]
    bus.producer("trainer.0").commit([outgoing(STEPS, event) for event in events])
    weights = {n: t.detach().clone() for n, t in trained.learner.weights().items()}
    return Stand(bus=bus, folder=folder, model=model, manifest=manifest, weights=weights)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Stand:
    return stand(tmp_path_factory.mktemp("moe"), "Qwen3MoeForCausalLM", LoraSection())


def shapes(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits


@pytest.mark.parametrize(
    ("name", "lora"), [*((name, LoraSection()) for name in FAMILIES), (FAMILIES[0], LORA)]
)
def test_the_library_loads_the_model_that_was_trained(
    name: str, lora: LoraSection, tmp_path: Path
) -> None:
    """Names and shapes of the first folder; the logits are those of the trained weights."""
    from transformers import AutoModelForCausalLM

    run = stand(tmp_path, name, lora)
    done = run.export()
    assert run.manifest.weight_hash == done.weight_hash == done.ledger_hash
    assert shapes(run.model) == shapes(tmp_path / "out")
    ours: Any = load_model(run.model)
    load_weights(ours, run.weights)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert done.weight_hash == weight_hash(weights_of(theirs))
    # Which kernel computes experts is the loader's choice, so the last bit may differ.
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)


def test_beside_the_weights_lies_what_a_server_needs(moe: Stand) -> None:
    """Configuration, tokenizer and template of the first folder, and where it all came from."""
    done = moe.export(step=2, dtype="bfloat16")
    out = moe.folder / "out"
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names
    assert "{{ messages }}" == (out / "chat_template.jinja").read_text()
    assert "{}" == (out / "tokenizer.json").read_text()
    facts = json.loads((out / "rlstreams.json").read_text())
    assert ("r", 2, "bfloat16") == (facts["run"], facts["step"], facts["dtype"])
    assert "bfloat16" == json.loads((out / "config.json").read_text())["dtype"]
    assert moe.manifest.weight_hash == done.ledger_hash != done.weight_hash
    with safe_open(out / "model.safetensors", "pt") as file:
        assert {"BF16"} == {file.get_slice(n).get_dtype() for n in file.keys()}  # noqa: SIM118


async def test_a_run_can_begin_with_it(moe: Stand, tmp_path: Path) -> None:
    """The built-in engine samples from the folder, its version 0 being the exported weights."""
    out = tmp_path / "out"
    export_model(moe.bus, moe.folder, moe.model, out)
    weights = weights_of(load_model(out))
    server = FileWeightServer(tmp_path / "weights", keep=2)
    published = announced(server, server.publish(0, weights))
    found: list[Any] = []
    async with driven(BuiltinEngine(out, slots=1)) as engine:
        await engine.pull(published, FileWeightChannel())
        prompt = np.array([1, 5, 9], np.int32)
        found.extend(await collect(engine, request("0/0/0", token_ids=prompt, max_new_tokens=3)))
    assert moe.manifest.weight_hash == published.weight_hash
    assert [0] == [segment.policy_version for segment in found]


@pytest.mark.parametrize("step", [7, 1])
def test_a_step_without_a_checkpoint_names_those_that_have_one(
    moe: Stand, step: int, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"no checkpoint of step {step} to .*there is one of st"):
        export_model(moe.bus, moe.folder, moe.model, tmp_path / "out", step=step)


def test_what_the_log_does_not_confirm_is_not_exported(moe: Stand, tmp_path: Path) -> None:
    """Half-written, of another run, of an epoch without a claim: each is named with its reason."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for wrong in (replace(moe.manifest, run="other"), replace(moe.manifest, epoch=9)):
        store.save(wrong, moe.weights, {})
        with pytest.raises(ConfigError, match=rf"{wrong.name}: (it is of run|epoch 9)"):
            export_model(moe.bus, tmp_path, moe.model, tmp_path / "out")
    torn = store.save(replace(moe.manifest, epoch=1), moe.weights, {}).name
    file = tmp_path / "checkpoints" / torn / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"{torn}: model.safetensors has hash"):
        export_model(moe.bus, tmp_path, moe.model, tmp_path / "out")
    assert ["checkpoints"] == [path.name for path in tmp_path.iterdir()]


def test_a_folder_in_use_is_left_alone(moe: Stand, tmp_path: Path) -> None:
    """Nothing of a user's is written over; an empty folder is taken."""
    kept = tmp_path / "out" / "kept"
    kept.parent.mkdir()
    kept.touch()
    with pytest.raises(ConfigError, match="not empty"):
        export_model(moe.bus, moe.folder, moe.model, kept.parent)
    kept.unlink()
    export_model(moe.bus, moe.folder, moe.model, kept.parent)
    assert (kept.parent / "config.json").is_file()


def test_another_model_s_folder_is_refused(moe: Stand, tmp_path: Path) -> None:
    """Its configuration and tokenizer would go with weights that are not its own."""
    other = families.make("Qwen3MoeForCausalLM", tmp_path / "other", initializer_range=0.4)
    with pytest.raises(ConfigError, match="the run began with"):
        export_model(moe.bus, moe.folder, other, tmp_path / "out")
