"""What a resumed run may change."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from rlstreams.streams.log.errors import ConfigError
from rlstreams.up.supervisor.up import changes, refuse_other_model
from rlstreams.workers.config.load import from_json, load, resolved_json
from rlstreams.workers.config.run import RolloutSection, RunConfig, RunSection
from rlstreams.workers.loop.agreement import WEIGHTS, weights_digest
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


def test_a_field_that_an_older_release_did_not_know_has_the_value_that_it_computed_with() -> None:
    """So an upgrade alone is no change, and a default that means another computation is one."""
    tree = json.loads(resolved_json(RunConfig()))
    del tree["trainer"]["loss"]["clip_dual"], tree["engine"]["adapt"], tree["guard"], tree["agent"]
    found = changes(json.dumps(tree), resolved_json(RunConfig()))
    assert [("trainer.loss.clip_dual", 0.0, 3.0)] == found
    assert changes(json.dumps(tree), resolved_json(from_json(json.dumps(tree)))) == []


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
    for name, what, key in (("trained", "weights", WEIGHTS), ("retokenized", *["tokenizer"] * 2)):
        path = config.model.path
        was = f"than {re.escape(path)} had .*, was {claim.hashes[key][:12]}"
        with pytest.raises(ConfigError, match=f"{name} has other {what} {was}"):
            refuse_other_model(with_model(name), claim)
    refuse_other_model(with_model("trained"), replace(claim, hashes={}))  # of an older release


def stored(folder: Path, *, dtype: str, values: npt.NDArray[np.float32]) -> str:
    """A folder of one tensor, written in a type of numpy or as bfloat16; its path."""
    folder.mkdir()
    upper = torch.from_numpy(values).to(getattr(torch, dtype))
    save_file({"layer.weight": upper}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(("computed", "is_refused"), [("float32", True), ("bfloat16", False)])
def test_the_type_of_a_file_is_no_other_model(
    tmp_path: Path, computed: str, *, is_refused: bool
) -> None:
    """Numbers count as a run computes with them: what was rounded away counts in float32 alone."""
    exact = torch.linspace(-3, 3, 4000).bfloat16().float().numpy()
    finer = exact * np.float32(1 + 2**-12)
    folders = {
        dtype: stored(tmp_path / dtype, dtype=dtype, values=exact)
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert 1 == len({weights_digest(path, computed) for path in folders.values()})
    folders["finer"] = stored(tmp_path / "finer", dtype="float32", values=finer)
    folders["rounded"] = stored(tmp_path / "rounded", dtype="bfloat16", values=finer)
    config = RunConfig()
    begun, now = (
        replace(config, model=replace(config.model, path=folders[name], dtype=computed))
        for name in ("finer", "rounded")
    )
    claim = trainer_started(config=resolved_json(begun), hashes=hashes_of(begun))
    with pytest.raises(ConfigError, match="has other weights") if is_refused else nullcontext():
        refuse_other_model(now, claim)


def test_experts_that_are_fused_are_the_same_model(tmp_path: Path) -> None:
    """In either form and type; another number in one of them is another model."""
    gate_up = torch.arange(4 * 6 * 8, dtype=torch.float32).reshape(4, 6, 8)
    down = -torch.arange(4 * 8 * 3, dtype=torch.float32).reshape(4, 8, 3)
    stem = "model.layers.0.mlp.experts"
    fused = {f"{stem}.gate_up_proj": gate_up, f"{stem}.down_proj": down}
    single = {f"{stem}.{n}.down_proj.weight": down[n] for n in range(4)}
    for n in range(4):
        single |= {
            f"{stem}.{n}.gate_proj.weight": gate_up[n, :3],
            f"{stem}.{n}.up_proj.weight": gate_up[n, 3:],
        }
    other = {**single, f"{stem}.2.up_proj.weight": gate_up[2, 3:] + 1}
    biased = {f"{name}_bias": torch.zeros(4, 8) for name in fused}
    forms = {
        "fused": fused,
        "single": single,
        "bfloat16": {name: tensor.bfloat16() for name, tensor in fused.items()},
        "other": other,
        "biased": fused | biased,
    }
    found = {}
    for name, tensors in forms.items():
        (tmp_path / name).mkdir()
        whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(whole, tmp_path / name / "model.safetensors")
        found[name] = weights_digest(str(tmp_path / name), "float32")
    assert found["fused"] == found["single"] == found["bfloat16"]
    assert 3 == len({found[name] for name in ("single", "other", "biased")})
