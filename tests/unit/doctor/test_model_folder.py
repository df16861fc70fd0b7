"""Parts of a model folder that do not belong together, and what a model takes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.start.doctor.check import Level
from rlstreams.start.doctor.memory import RoleMemory, cache_mb, estimate, memory_check, table
from rlstreams.start.doctor.model import model_checks, read_model
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig

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


def roles(*overrides: str) -> list[RoleMemory]:
    config: RunConfig = load([ROOT / "infra/examples/demo.toml"], overrides)
    return estimate(read_model(str(MODEL)), config)


def test_a_table_tells_what_each_role_takes() -> None:
    """A row a role, the sum, and whether it fits."""
    lines = table(roles("--rollout.workers=2"), free_mb=10_000)
    assert ["broker", "prompts", "2 x rollout", "logprob", "trainer", "all"] == [
        line[:16].strip() for line in lines[1:]
    ]
    assert "fits: 10,000 MB are free" in lines[-1]
    assert "does not fit: 1,000 MB" in table(roles(), free_mb=1_000)[-1]


def test_what_does_not_fit_is_named() -> None:
    """All together: a warning. One role alone: a failure, with its largest part and the way out."""
    assert Level.OK is memory_check(roles(), free_mb=10_000).level
    assert Level.WARN is memory_check(roles(), free_mb=1_500).level
    check = memory_check(roles("--trainer.micro_batch_tokens=10000000"), free_mb=10_000)
    assert Level.FAIL is check.level
    assert "trainer alone takes" in check.found
    assert "most of it for activations" in check.found
    assert "trainer.micro_batch_tokens" in check.advice


def test_sixteen_bits_and_layers_computed_again_take_less() -> None:
    """Weights halve, their lower halves are told, activations shrink; logits have a bound."""
    plain, small = (
        {role.role: role.items for role in roles("--trainer.micro_batch_tokens=1000000", *more)}
        for more in ((), ("--model.dtype=bfloat16", "--trainer.activation_checkpointing=true"))
    )
    assert small["logprob"]["versions held"] == plain["logprob"]["versions held"] / 2
    assert small["trainer"]["lower halves"] == small["trainer"]["weights"]
    assert small["trainer"]["activations"] < plain["trainer"]["activations"] / 2
    assert plain["trainer"]["logits"] == 5 * 256 * 1.048576


def test_what_lies_on_a_gpu_takes_none_of_this_machines_memory() -> None:
    """Weights pass through it, samples stay; the table says what the GPU holds."""
    on_gpu = ("--trainer.device=cuda", "--logprob.device=cuda:1", "--rollout.device=cuda:2")
    plain, placed = (
        {role.role: role for role in roles("--rollout.slots=4096", *more)} for more in ((), on_gpu)
    )
    for name in ("rollout", "logprob", "trainer"):
        assert plain[name].items.items() - placed[name].items.items() <= (
            placed[name].on_gpu.items()
        )
        assert {} == plain[name].on_gpu
    assert {"process", "weights while they are loaded"} == placed["rollout"].items.keys()
    assert {"process", "a checkpoint", "samples"} == placed["trainer"].items.keys()
    lines = table(list(placed.values()), free_mb=10_000)
    assert 3 == sum("  on its GPU " in line for line in lines)


def test_several_ranks_serve_from_this_machines_memory() -> None:
    """And so does one, if it is asked to; the other ranks hold nothing here for long."""
    several = roles("--trainer.device=cuda", "--trainer.ranks=2", "--weights.channel=nccl")
    trainer, ranks = several[-2:]
    assert ("trainer", "ranks") == (trainer.role, ranks.role)
    assert "versions served" in trainer.items
    assert {"process", "weights while they are loaded"} == ranks.items.keys()
    pinned = roles("--trainer.device=cuda", "--weights.channel=nccl", "--weights.snapshot=pinned")
    assert "versions served" in pinned[-1].items
    assert "versions served" not in pinned[-1].on_gpu


def test_beside_a_model_server_the_rollout_role_is_small() -> None:
    """No cache and no logits; a version only where it is handed on as a folder."""
    (by_file,), (by_piece,) = (
        [r.items for r in roles("--rollout.engine=vllm", *more) if r.role == "rollout"]
        for more in ((), ("--weights.channel=gloo",))
    )
    assert {"process", "a version handed on"} == by_file.keys()
    assert {"process"} == by_piece.keys()


def test_a_reference_is_one_more_copy_of_the_weights() -> None:
    """In the log-prob worker, and only where the loss asks for it."""
    (off,), (on,) = (
        [role.items for role in roles(*more) if role.role == "logprob"]
        for more in ((), ("--trainer.loss.kl_coef=0.01",))
    )
    assert "reference" not in off
    assert on == {**off, "reference": off["versions held"] / 2}


def test_the_cache_is_of_all_turns(tmp_path: Path) -> None:
    """A sample of several turns is as long as all of them, up to the model's longest."""
    folder = copied(tmp_path, max_position_embeddings=1 << 20)
    config = load([ROOT / "infra/examples/second_try.toml"])
    turns = config.environment.max_turns
    alone = replace(config, environment=replace(config.environment, max_turns=1))
    endless = read_model(str(folder))
    assert turns > 1
    assert turns * cache_mb(endless, alone) == pytest.approx(cache_mb(endless, config))
    changed(folder / "config.json", max_position_embeddings=128)
    short = read_model(str(folder))
    assert cache_mb(short, alone) == cache_mb(short, config)


def test_a_sample_above_the_token_budget_counts_by_its_length(tmp_path: Path) -> None:
    """It is a micro-batch of its own, so a smaller budget saves nothing."""
    folder = copied(tmp_path, max_position_embeddings=1 << 20)
    model = read_model(str(folder))

    def activations(*more: str) -> float:
        config = load([ROOT / "infra/examples/second_try.toml"], [*more])
        return next(r for r in estimate(model, config) if r.role == "trainer").items["activations"]

    long = "environment.max_turns=64"
    assert activations(long, "trainer.micro_batch_tokens=256") == activations(
        long, "trainer.micro_batch_tokens=512"
    )
    assert activations("trainer.micro_batch_tokens=4096") < activations(
        long, "trainer.micro_batch_tokens=4096"
    )
