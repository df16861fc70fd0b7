"""Which GPUs a run uses, which it leaves idle, and whether what goes on one fits there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.start.doctor.check import Check, Level
from rlstreams.start.doctor.gpu_memory import gpu_memory_checks
from rlstreams.start.doctor.gpus import (
    VISIBLE,
    Gpu,
    GpuInventory,
    gpu_checks,
    gpu_inventory,
    visible,
)
from rlstreams.start.doctor.host import EVERYTHING, Host
from rlstreams.start.doctor.memory import estimate
from rlstreams.start.doctor.model import ModelFolder, read_model
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "infra/examples"
DEMO, TWO = EXAMPLES / "demo.toml", EXAMPLES / "demo-gpu.toml"
BIG_MB = 6880.0  # of 1.7e9 parameters in float32
EIGHTY = 85_520.0  # MB of an H100
# As nvidia-smi writes them: MiB.
LISTED = """\
0, GPU-aaaa-1, NVIDIA H100 80GB HBM3, 81008, 81559
1, GPU-bbbb-2, NVIDIA H100 80GB HBM3, 40000, 81559
"""


@pytest.fixture(autouse=True)
def nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)


def gpus(count: int, *, busy: Sequence[int] = (), total_mb: float = EIGHTY) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            index=n,
            uuid=f"GPU-{n}{n}{n}",
            name="H100",
            free_mb=total_mb * (0.5 if n in busy else 0.99),
            total_mb=total_mb,
        )
        for n in range(count)
    )


def checks(
    count: int, *words: str, weights_mb: float = BIG_MB, busy: Sequence[int] = ()
) -> dict[str, Check]:
    config = load([DEMO], words)
    found = gpu_checks(config, GpuInventory(gpus=gpus(count, busy=busy)), weights_mb=weights_mb)
    return {check.name: check for check in found}


def install_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str, status: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{lines}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_the_driver_is_asked_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number, name and memory; one that fails, or says something else, is told."""
    install_smi(tmp_path, monkeypatch, LISTED)
    first, second = gpu_inventory().gpus
    assert (0, "GPU-aaaa-1", "NVIDIA H100 80GB HBM3") == (first.index, first.uuid, first.name)
    assert (85_520.8, 41_943.0) == (round(first.total_mb, 1), round(second.free_mb, 1))
    install_smi(tmp_path, monkeypatch, "driver/library version mismatch\n", status=18)
    inventory = gpu_inventory()
    assert ((), True) == (inventory.gpus, inventory.is_broken)
    assert "nvidia-smi fails: driver/library version mismatch" == inventory.problem
    install_smi(tmp_path, monkeypatch, "0, GPU-a, Tegra, [N/A], [N/A]\n")
    assert "cannot be understood" in gpu_inventory().problem


def test_none_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the field that asks; where none does, none is missed."""
    monkeypatch.setenv("PATH", "")
    inventory = gpu_inventory()
    (check,) = gpu_checks(load([DEMO]), inventory)
    assert (Level.OK, True) == (check.level, "every role computes on the CPU" in check.found)
    wanted = load([DEMO], ["--trainer.device=cuda:0"])
    (check,) = gpu_checks(wanted, inventory)
    assert check.level is Level.WARN
    assert "no nvidia-smi" in check.found


@pytest.mark.parametrize(
    ("named", "left"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-11", [1]),
        ("1,7,0", [1]),
        ("MIG-5", []),
    ],
)
def test_what_the_variable_leaves(named: str | None, left: list[int]) -> None:
    """In its order; a name that there is not ends the list, as CUDA reads it."""
    assert left == [gpu.index for gpu in visible(gpus(3), named)]


def test_a_number_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a role, of one of its ranks, and among those that are visible."""
    check = checks(2, "--trainer.device=cuda:2")["gpus"]
    assert check.level is Level.FAIL
    assert check.found.startswith("there is none for trainer.device = cuda:2; there are: 0: H100")
    ranks = checks(2, "--trainer.device=cuda:1", "--trainer.ranks=2")["gpus"]
    assert "none for trainer.device = cuda:1 and 1 behind it" in ranks.found
    assert checks(2, "--trainer.device=cuda:1")["gpus"].level is Level.OK
    monkeypatch.setenv(VISIBLE, "1")
    assert checks(2, "--trainer.device=cuda:1")["gpus"].level is Level.FAIL


def test_gpus_that_no_role_uses_are_named_with_the_fields_that_would() -> None:
    """Of roles on the CPU first; not those that somebody else uses; not for a toy."""
    check = checks(2)["unused gpus"]
    assert (Level.WARN, "no role uses GPU 0 (H100), 1 (H100)") == (check.level, check.found)
    assert 'set trainer.device = "cuda:0", logprob.device = "cuda:1"' == check.advice
    check = checks(3, "--trainer.device=cuda:0", "--logprob.device=cuda:1")["unused gpus"]
    assert ("no role uses GPU 2 (H100)", 'set rollout.device = "cuda:2"') == (
        check.found,
        check.advice,
    )
    words = [f"--{role}.device=cuda:0" for role in ("trainer", "logprob", "rollout")]
    assert "trainer.ranks" in checks(2, *words)["unused gpus"].advice
    assert "unused gpus" not in checks(2, *words, "--trainer.ranks=2")
    assert "unused gpus" not in checks(2, *words, busy=[1])
    toy = checks(2, weights_mb=1.1)["unused gpus"]
    assert (Level.OK, True) == (toy.level, "a model of 1.1 MB needs none" in toy.found)


def test_the_gpus_of_a_server_are_used_too() -> None:
    """Those that `engine.env` leaves it, as many as it is spread over."""
    words = [
        "--rollout.engine=vllm",
        f"--engine.env.{VISIBLE}=1,2",
        "--trainer.device=cuda:0",
        "--logprob.device=cuda:0",
    ]
    assert checks(3, *words)["unused gpus"].found == "no role uses GPU 2 (H100)"
    assert "unused gpus" not in checks(3, *words, "--engine.args.tensor_parallel_size=2")
    lacking = checks(3, *words, "--engine.args.tp-size=3")["gpus"]
    assert "none for engine.env.CUDA_VISIBLE_DEVICES = 1,2" in lacking.found


def test_nccl_takes_no_puller_on_the_gpu_of_the_trainer() -> None:
    """Told before the pull would fail; by files it may."""
    words = ["--trainer.device=cuda:0", "--logprob.device=cuda:0", "--weights.channel=nccl"]
    check = checks(1, *words)["weights.channel"]
    assert check.level is Level.FAIL
    assert "logprob.device = cuda:0 means GPU 0, from which the trainer sends" in check.found
    assert "weights.channel" not in checks(1, *words, "--weights.channel=file")
    assert "weights.channel" not in checks(2, *words, "--logprob.device=cuda:1")


def test_a_role_by_itself_is_asked_of_its_own_gpu_alone() -> None:
    """Others of its host's GPUs are for other roles."""
    config = load([DEMO, TWO])
    inventory = GpuInventory(gpus=gpus(1))
    (check,) = gpu_checks(config, inventory, Host(role="trainer"), weights_mb=BIG_MB)
    assert check.level is Level.OK
    (check,) = gpu_checks(config, inventory, Host(role="logprob"), weights_mb=BIG_MB)
    assert "none for logprob.device = cuda:1" in check.found


def qwen3(layers: int, hidden: int, mlp: int, parameters: float) -> ModelFolder:
    shape: dict[str, object] = {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    }
    demo = read_model(str(EXAMPLES / "demo/model"))
    return replace(demo, config=shape, num_parameters=int(parameters))


SMALL = qwen3(28, 2048, 6144, 1.72e9)


def memory(config: RunConfig, count: int = 1, **changes: object) -> list[Check]:
    given = {"gpus": gpus(count), "host": EVERYTHING, "is_up": False, **changes}
    return list(gpu_memory_checks(config, estimate(SMALL, config), **given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "tokens", "is_checkpointed", "measured_gb"),
    [
        (SMALL, 16_384, "true", 32.6),
        (SMALL, 8_192, "false", 55.5),
        (qwen3(36, 2560, 9728, 4.02e9), 16_384, "true", 70.8),
        (qwen3(36, 4096, 12_288, 8.19e9), 8_192, "true", 141.1),
    ],
)
def test_the_estimate_of_training_is_near_what_was_measured(
    model: ModelFolder, tokens: int, is_checkpointed: str, measured_gb: float
) -> None:
    """Peaks of infra/docs/models.md, on one H200."""
    words = [
        "--model.dtype=bfloat16",
        "--trainer.device=cuda:0",
        f"--trainer.micro_batch_tokens={tokens}",
        f"--trainer.activation_checkpointing={is_checkpointed}",
    ]
    config = load([], words)
    (check,) = gpu_memory_checks(
        config, estimate(model, config), gpus(1, total_mb=150_754), EVERYTHING, is_up=False
    )
    estimated = float(check.found.split("trainer ")[1].split(" MB")[0].replace(",", ""))
    assert estimated / 1000 == pytest.approx(measured_gb, rel=0.12)


def test_a_server_beside_a_trainer_on_one_gpu() -> None:
    """Its fraction counts whole; the advice is the fraction that would fit."""
    words = [
        "--model.dtype=bfloat16",
        "--trainer.device=cuda:0",
        "--trainer.activation_checkpointing=true",
        "--rollout.engine=vllm",
        f"--engine.env.{VISIBLE}=0",
    ]
    (check,) = memory(load([DEMO], [*words, "--engine.args.gpu-memory-utilization=0.8"]))
    assert (Level.WARN, "gpu 0 memory") == (check.level, check.name)
    assert check.found.startswith("estimate: trainer ")
    assert "vllm (0.8 of it) 68,416" in check.found
    assert check.advice.startswith("set engine.args.gpu-memory-utilization to at most 0.6")
    assert (
        "vllm (0.9 of it, as usual where nothing is said)" in memory(load([DEMO], words))[0].found
    )
    fits = load([DEMO], [*words, "--engine.args.gpu_memory_utilization=0.5"])
    assert [Level.OK] == [check.level for check in memory(fits)]


def test_what_does_not_fit_is_a_warning_and_says_what_to_change() -> None:
    """Weights in float32 with their moments on a small GPU; nothing of a server in the advice."""
    (check,) = memory(load([DEMO], ["--trainer.device=cuda:0"]), gpus=gpus(1, total_mb=24_000))
    assert check.level is Level.WARN
    assert 'model.dtype = "bfloat16"' in check.advice
    assert "gpu-memory" not in check.advice


def test_memory_that_somebody_else_has_taken() -> None:
    """Unless the run itself may be up: then it is its own."""
    config = load([DEMO], ["--trainer.device=cuda:0", "--model.dtype=bfloat16",
                           "--trainer.micro_batch_tokens=6000"])  # fmt: skip
    taken = gpus(1, busy=[0], total_mb=80_000)
    (check,) = memory(config, gpus=taken)
    assert (Level.WARN, True) == (check.level, "only 40,000 are free now" in check.found)
    assert [Level.OK] == [check.level for check in memory(config, gpus=taken, is_up=True)]


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("tensor-parallel-size=auto", "vllm (0.9 of it"),
        ("gpu-memory-utilization=most", "vllm (0.9 of it"),
        ("kv-cache-memory-bytes=20g", "vllm (kv-cache-memory-bytes, without its weights) 20,500"),
        ("kv-cache-memory-bytes=20G", "vllm (kv-cache-memory-bytes, without its weights) 21,975"),
    ],
)
def test_arguments_of_a_server_are_the_servers_to_judge(argument: str, part: str) -> None:
    """What is no number for us may be one for it, or is refused by it; the rest is looked at."""
    config = load([DEMO], ["--rollout.engine=vllm", f"--engine.args.{argument}"])
    (check,) = memory(config, gpus=gpus(1))
    assert part in check.found


def test_slices_of_a_gpu_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIG: the driver's list of GPUs does not name them, and a role that has one is no fault."""
    monkeypatch.setenv(VISIBLE, "MIG-1f2e")
    found = checks(1, "--trainer.device=cuda:0")
    assert ["gpus"] == list(found)
    assert (Level.WARN, True) == (found["gpus"].level, "MIG-1f2e" in found["gpus"].found)
