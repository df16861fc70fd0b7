"""Which GPUs a run uses, which it leaves idle, and whether what goes on one fits there."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.check.doctor.check import EVERYTHING, Check, Host, Level
from rlstreams.check.doctor.devices import (
    Gpu,
    gpu_check,
    gpu_inventory,
    group_mb,
    memory_checks,
    placements,
    sizes,
    visible,
)
from rlstreams.check.doctor.diagnose import preflight
from rlstreams.check.doctor.machine import disk
from rlstreams.check.doctor.model import ModelFolder, read_model
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.engine import VISIBLE
from rlstreams.workers.config.load import load

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "infra/examples"
DEMO = EXAMPLES / "demo.toml"
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


def gpus_of(count: int, *words: str, host: Host = EVERYTHING) -> Check:
    config, there = load([DEMO], words), gpus(count)
    return gpu_check(there, "", list(placements(config, there, host, os.environ.get(VISIBLE))))


def install_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str, status: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{lines}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_the_driver_is_asked_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number, name and memory; one that fails, or says something else, is told."""
    install_smi(tmp_path, monkeypatch, LISTED)
    (first, second), _ = gpu_inventory()
    assert (0, "GPU-aaaa-1", "NVIDIA H100 80GB HBM3") == (first.index, first.uuid, first.name)
    assert (85_520.8, 41_943.0) == (round(first.total_mb, 1), round(second.free_mb, 1))
    install_smi(tmp_path, monkeypatch, "driver/library version mismatch\n", status=18)
    assert ((), "nvidia-smi fails: driver/library version mismatch") == gpu_inventory()
    install_smi(tmp_path, monkeypatch, "0, GPU-a, Tegra, [N/A], [N/A]\n")
    assert "cannot be understood" in gpu_inventory()[1]


def test_none_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the field that asks; where none does, none is missed."""
    monkeypatch.setenv("PATH", "")
    found = gpu_check(*gpu_inventory(), list(placements(load([DEMO]), ())))
    assert (Level.OK, True) == (found.level, "every role computes on the CPU" in found.found)
    wanted = load([DEMO], ["--trainer.device=cuda:0"])
    found = gpu_check(*gpu_inventory(), list(placements(wanted, ())))
    there = any(Path("/dev").glob("nvidia[0-9]*"))  # a container may hide nvidia-smi alone
    assert found.level is (Level.WARN if there else Level.FAIL)
    assert "no nvidia-smi" in found.found


def test_a_start_says_what_gpus_are_for_and_refuses_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a broker is started: by its field, as the doctor does."""
    told: list[str] = []
    words = [f"--run.dir={tmp_path / 'run'}", "--broker.port=0"]
    install_smi(tmp_path, monkeypatch, LISTED)
    preflight(load([DEMO], words), told.append)
    (line,) = [line for line in told if line.startswith("GPUs: ")]
    assert "every role computes on the CPU; to use it: `rlstreams init DIR" in line
    assert "NVIDIA H100 80GB HBM3" in line
    with pytest.raises(ConfigError, match=r"none for trainer\.device = cuda:2.*name one that is"):
        preflight(load([DEMO], [*words, "--trainer.device=cuda:2"]))


def test_a_start_says_what_two_roles_need_that_do_not_fit_on_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum, and what to lower: not the first allocation that fails, minutes later."""
    told: list[str] = []
    both = [f"--{role}.device=cuda:0" for role in ("trainer", "logprob")]
    install_smi(tmp_path, monkeypatch, "0, GPU-aaaa-1, NVIDIA T4, 700, 800\n")
    preflight(load([DEMO], [f"--run.dir={tmp_path / 'run'}", *both]), told.append)
    (line,) = [line for line in told if "gpu 0 memory" in line]
    assert re.match(
        r"warning: gpu 0 memory: logprob 0\.5 \+ trainer 0\.5 GB .* it has 0\.8 GB", line
    )
    assert "logprob.device on another GPU, lower logprob.versions_held" in line


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
    found = gpus_of(2, "--trainer.device=cuda:2")
    assert found.level is Level.FAIL
    assert found.found.startswith("there is none for trainer.device = cuda:2; there are: 0: H100")
    ranks = gpus_of(2, "--trainer.device=cuda:1", "--trainer.ranks=2")
    assert "none for trainer.device = cuda:1 and 1 behind it" in ranks.found
    assert gpus_of(2, "--trainer.device=cuda:1").level is Level.OK
    monkeypatch.setenv(VISIBLE, "1")
    assert gpus_of(2, "--trainer.device=cuda:1").level is Level.FAIL


def test_the_gpus_of_a_server_are_named_by_its_environment() -> None:
    """As many as it is spread over, of those that `engine.env` leaves it."""
    words = ["--rollout.engine=vllm", f"--engine.env.{VISIBLE}=1,2"]
    assert gpus_of(3, *words, "--engine.args.tensor_parallel_size=2").level is Level.OK
    lacking = gpus_of(3, *words, "--engine.args.tp-size=3")
    assert "none for engine.env.CUDA_VISIBLE_DEVICES = 1,2" in lacking.found


def test_a_role_by_itself_is_asked_of_its_own_gpu_alone() -> None:
    """Others of its host's GPUs are for other roles."""
    words = ["--trainer.device=cuda:0", "--logprob.device=cuda:1"]
    assert gpus_of(1, *words, host=Host(role="trainer")).level is Level.OK
    lacking = gpus_of(1, *words, host=Host(role="logprob"))
    assert "none for logprob.device = cuda:1" in lacking.found


def test_scorers_take_one_gpu_after_another() -> None:
    """Each as many as it has ranks; none where the trainer, or nobody, computes log-probs."""
    words = ["--logprob.device=cuda:1", "--logprob.workers=2", "--logprob.ranks=2"]
    config = load([DEMO], words)
    (place,) = (place for place in placements(config, gpus(6)) if place.num_wanted)
    assert ([1, 2, 3, 4], 4) == ([gpu.index for gpu in place.gpus], place.num_wanted)
    assert ["cuda:1", "cuda:3"] == [config.of_replica(n).logprob.device for n in range(2)]
    whole, cut = (sizes(sized(1e9), load([DEMO], given))["logprob"] for given in (words[:2], words))
    assert cut < 0.6 * whole
    words += ["--logprob.place=off", "--trainer.loss.proximal=behavior"]
    words += ["--trainer.loss.correction=none"]
    none = load([DEMO], words)
    assert ["rollout", "trainer"] == [place.role for place in placements(none, gpus(6))]
    compares = load([DEMO], [*words, "--trainer.loss.kl_coef=0.1"])
    alone = [place.role for place in placements(compares, gpus(6))]
    assert ["rollout", "logprob", "trainer"] == alone
    needs, needed = sizes(sized(1e9), compares), sizes(sized(1e9), none)
    assert needs["trainer"] == needed["trainer"]
    assert needs["logprob"] - needed["logprob"] == pytest.approx(4000 / 2)  # one copy, on two ranks


def sized(parameters: float) -> ModelFolder:
    """The demo's folder as if its model had so many weights."""
    return replace(read_model(str(EXAMPLES / "demo/model")), num_parameters=int(parameters))


def memory(size: float, *words: str, on: tuple[Gpu, ...], is_up: bool = False) -> Check:
    usual = ["--model.dtype=bfloat16", "--trainer.device=cuda:0", "--logprob.device=cpu"]
    config = load([DEMO], [*usual, *words])
    places = list(placements(config, on))
    _, check = memory_checks(config, sized(size), places, 1e6, is_up=is_up)
    return check


@pytest.mark.parametrize(
    ("parameters", "words", "measured_gb"),
    [
        (1.72e9, (), 32.6),
        (4.02e9, (), 70.8),
        (8.19e9, (), 141.1),
        (8.19e9, ("--trainer.lora.rank=16",), 31.1),
    ],
)
def test_what_training_needs_is_what_was_measured(
    parameters: float, words: tuple[str, ...], measured_gb: float
) -> None:
    """Peaks of infra/docs/models.md, on one H200."""
    told = memory(parameters, *words, on=gpus(1, total_mb=150_754)).found
    assert float(told.split()[1]) == pytest.approx(measured_gb, rel=0.03)


def test_memory_that_a_gpu_does_not_have() -> None:
    """Too small, taken by somebody else, or by the share that a server reserves."""
    check = memory(4.02e9, on=gpus(1, total_mb=40_000))
    assert (Level.WARN, True) == (check.level, "trainer.lora.rank" in check.advice)
    taken = gpus(1, busy=[0], total_mb=60_000)
    assert "of which 30.0 are free now" in memory(1.72e9, on=taken).found
    assert memory(1.72e9, on=taken, is_up=True).level is Level.OK
    served = ["--rollout.engine=vllm", f"--engine.env.{VISIBLE}=0"]
    check = memory(1.72e9, *served, on=gpus(1))
    assert (Level.WARN, True) == (check.level, "gpu-memory-utilization" in check.advice)
    half = "--engine.args.gpu_memory_utilization=0.5"
    assert memory(1.72e9, *served, half, on=gpus(1)).level is Level.OK


def test_a_scorer_beside_the_trainer_is_said_and_added_up() -> None:
    """Why it is there; and where the two do not fit, their sum and what to lower."""
    words = ["--trainer.device=cuda:0", "--logprob.device=auto"]
    assert "logprob.device = cuda:0 (auto: it is the trainer's" in gpus_of(1, *words).found
    assert "logprob.device = cuda:1 (auto: no other role" in gpus_of(2, *words).found
    short = memory(4.02e9, "--logprob.device=auto", on=gpus(1, total_mb=80_000))
    assert short.level is Level.WARN
    assert "logprob 25.6 + trainer 71.2 GB" in short.found
    assert short.advice.startswith("logprob.device on another GPU, lower logprob.versions_held")
    assert memory(1.72e9, "--logprob.device=auto", on=gpus(1)).level is Level.OK


def test_several_servers_of_a_worker_are_dealt_its_gpus() -> None:
    """Each has one of its own; where there are too few, the first have two; all must be there."""
    words = ["--rollout.engine=vllm", "--engine.servers=3"]
    config = load([DEMO], [*words, f"--engine.env.{VISIBLE}=1,2"])
    placed = [([g.index for g in p.gpus], p.processes) for p in placements(config, gpus(4))][-2:]
    assert [([2], 1), ([1], 2)] == placed
    assert gpus_of(3, *words, f"--engine.env.{VISIBLE}=0,1,2").level is Level.OK
    assert gpus_of(2, *words, f"--engine.env.{VISIBLE}=0,1,2").level is Level.FAIL


def test_servers_of_several_workers_on_one_gpu_are_added_up() -> None:
    """Each has its share, or the cache that was named if that is more."""
    served = ["--rollout.engine=vllm", f"--engine.env.{VISIBLE}=0", "--rollout.workers=3"]
    served.append("--engine.args.gpu_memory_utilization=0.15")
    three = memory(1e8, *served, on=gpus(1))
    assert (Level.OK, True) == (three.level, "3 x server 12.8 GB" in three.found)
    cache = memory(1e8, *served, "--engine.args.kv_cache_memory_bytes=30000000000", on=gpus(1))
    assert (Level.WARN, True) == (cache.level, "3 x server 30.0 GB" in cache.found)


def test_what_fits_of_the_examples_of_several_gpus() -> None:
    """In shifts the largest counts: a model of 8 billion on eight GPUs of 80 GB, one of 60 not.
    The host holds what is off-loaded."""
    run = [EXAMPLES / "gsm8k-2gpu.toml", EXAMPLES / "eight-gpus-hybrid.toml"]
    config, on = load(run), gpus(8)
    places = list(placements(config, on))
    assert gpu_check(on, "", places).level is Level.OK
    of_size = {
        size: list(memory_checks(config, sized(size), places, 500_000, is_up=False))
        for size in (8.19e9, 61e9)
    }
    on_host, *on_gpus = of_size[8.19e9]
    told = on_gpus[0].found
    assert {Level.OK} == {check.level for check in on_gpus}
    assert told.startswith("logprob ")
    assert "trainer 26.8 + server 68.4 (logprob, trainer, server in shifts) GB" in told
    assert [Level.WARN] * 8 == [check.level for check in of_size[61e9][1:]]
    assert (Level.OK, True) == (on_host.level, "8 x trainer off-loaded 26.8" in on_host.found)
    (short, *_) = memory_checks(config, sized(8.19e9), places, 200_000, is_up=False)
    assert short.level is Level.WARN
    alone = load(run[:1])
    (host, *_) = memory_checks(alone, sized(8.19e9), list(placements(alone, on)), 1e6, is_up=False)
    assert "no role computes here" in host.found


def test_a_judge_on_the_samplers_gpu_is_memory_that_is_taken() -> None:
    """It is no process of the run: what it leaves must do for the run's own."""
    run = [EXAMPLES / "gsm8k-2gpu.toml", EXAMPLES / "judge.toml"]
    for share, level in ((0.4, Level.OK), (0.6, Level.WARN)):
        config = load(run, [f"--engine.args.gpu-memory-utilization={share}"])
        places = list(placements(config, on := gpus(2, busy=[1])))
        assert gpu_check(on, "", places).level is Level.OK
        _, trainers, samplers = memory_checks(config, sized(0.6e9), places, 1e6, is_up=False)
        assert (Level.OK, level) == (trainers.level, samplers.level), samplers


def test_memory_for_an_optimizer_of_one_s_own_says_what_it_assumes(tmp_path: Path) -> None:
    """On the host, on a GPU and on the disk; not where only adapters learn."""
    (tmp_path / "lion.py").write_text("def update(p): ...", encoding="utf-8")
    own = f"--trainer.optimizer.kind={tmp_path / 'lion.py'}:update"
    says = "with two moments as of AdamW, whatever state trainer.optimizer.kind keeps; it has"
    assert says in memory(1e9, own, on=gpus(1)).found
    assert says not in memory(1e9, on=gpus(1)).found
    assert says not in memory(1e9, own, "--trainer.lora.rank=8", on=gpus(1)).found
    config = load([DEMO], [own])
    (host,) = memory_checks(config, sized(1e8), list(placements(config, ())), 1e6, is_up=False)
    assert "trainer.optimizer.kind keeps; 1000.0 GB are free" in host.found
    assert disk(config, 400.0).found.endswith("trainer.optimizer.kind keeps")
    assert disk(load([DEMO]), 400.0).found.endswith("are needed")


def test_memory_of_roles_on_the_cpu() -> None:
    """All together: a warning. One role alone: a failure."""
    config = load([DEMO])
    places = list(placements(config, ()))
    levels = [
        check.level
        for free_mb in (100_000, 5_000, 1_000)
        for check in memory_checks(config, sized(1e8), places, free_mb, is_up=False)
    ]
    assert [Level.OK, Level.WARN, Level.FAIL] == levels


TWO = "memory.max memory.current inactive_file"
ONE = "memory.limit_in_bytes memory.usage_in_bytes total_inactive_file"


@pytest.mark.parametrize(
    ("line", "names", "limits", "left_mb"),
    [
        ("0::/", TWO, {"": "3000000000"}, 2100),  # a container's own group is the top
        (
            "0::/a/b",
            TWO,
            {"a": "2000000000", "a/b": "max"},
            1100,
        ),  # a group above it counts as well
        ("0::/a/b", TWO, {"a/b": "max"}, math.inf),
        ("0::/not/there", TWO, {}, math.inf),
        ("4:cpu,memory:/docker/1f", ONE, {"memory": "3000000000"}, 2100),
        ("4:memory:/a", ONE, {"memory": "9223372036854771712", "memory/a": "2000000000"}, 1100),
        ("4:cpu:/a", ONE, {"cpu/a": "2000000000"}, math.inf),
    ],
)
def test_a_containers_limit_is_all_the_memory_that_there_is(
    line: str, names: str, limits: dict[str, str], left_mb: float, tmp_path: Path
) -> None:
    """1,000 MB are used, of which 100 only cache files."""
    limit, used, cached = names.split()
    for name, size_bytes in limits.items():
        folder = tmp_path / "groups" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{size_bytes}\n")
        (folder / used).write_text("1000000000\n")
        (folder / "memory.stat").write_text(f"anon 900000000\n{cached} 100000000\n")
    member = tmp_path / "member"
    member.write_text(f"1:name=systemd:/x:y\n{line}\n")
    assert left_mb == group_mb(member, tmp_path / "groups")
    assert math.inf == group_mb(tmp_path / "none", tmp_path / "groups")


def test_slices_of_a_gpu_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIG: the driver's list of GPUs does not name them, and a role that has one is no fault."""
    monkeypatch.setenv(VISIBLE, "MIG-1f2e")
    found = gpus_of(1, "--trainer.device=cuda:0")
    assert (Level.WARN, True) == (found.level, "MIG-1f2e" in found.found)
