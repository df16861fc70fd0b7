"""Which GPUs this host has, which of them a run will use, and which it leaves idle."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlstreams.start.doctor.check import Check, fail, ok, warn
from rlstreams.start.doctor.host import EVERYTHING, Host
from rlstreams.start.doctor.memory import CPU
from rlstreams.workers.config.run import RunConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK_S = 5.0
MIB = 1.048576  # MB
SMALL_MB = 100.0  # weights in float32 below which a GPU is no faster than a processor
IDLE = 0.9  # share of a GPU's memory that is free where nobody uses it
SERVER = "server"  # as a role: the model server that a rollout worker starts
_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.free,memory.total",
          "--format=csv,noheader,nounits"]  # fmt: skip
_SLICE = "MIG-"  # how one is named where a GPU would be
_RANKS = ("tensor-parallel-size", "tp-size", "tp")  # GPUs of a server, in both spellings


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One, as the driver lists it."""

    index: int  # of the host, whatever is hidden
    uuid: str
    name: str
    free_mb: float
    total_mb: float

    def __str__(self) -> str:
        return f"{self.index}: {self.name}, {self.free_mb:,.0f} of {self.total_mb:,.0f} MB free"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInventory:
    """What the driver says."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""  # why there are none
    is_broken: bool = False  # the driver fails, rather than that there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlacement:
    """A role's GPUs."""

    role: str
    field: str  # that says so, with its value
    gpus: tuple[Gpu, ...]  # those that are there
    num_wanted: int
    processes: int = 1  # on each of them


def gpu_inventory() -> GpuInventory:
    """All GPUs of this host, asked of `nvidia-smi`: torch would take seconds to import."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return GpuInventory(problem="none found (no nvidia-smi)")
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        last = said[-1] if said else done.returncode
        return GpuInventory(problem=f"nvidia-smi fails: {last}", is_broken=True)
    try:
        return GpuInventory(gpus=tuple(_gpu(line) for line in done.stdout.strip().splitlines()))
    except ValueError as err:  # a kind that does not tell its memory
        return GpuInventory(problem=f"nvidia-smi cannot be understood: {err}", is_broken=True)


def _gpu(line: str) -> Gpu:
    index, uuid, name, free, total = (cell.strip() for cell in line.split(","))
    return Gpu(
        index=int(index), uuid=uuid, name=name, free_mb=MIB * int(free), total_mb=MIB * int(total)
    )


def visible(gpus: Sequence[Gpu], named: str | None) -> tuple[Gpu, ...]:
    """Those that `CUDA_VISIBLE_DEVICES` leaves, in its order; what it does not know ends the list.

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables.

    Args:
        named: its value; None: not set, all are left.
    """
    if named is None:
        return tuple(gpus)
    left = []
    for name in (name.strip() for name in named.split(",")):
        found = [g for g in gpus if name and (name == str(g.index) or _is_uuid(g, name))]
        if len(found) != 1:
            break
        left += found
    return tuple(left)


def _is_uuid(gpu: Gpu, name: str) -> bool:
    return name.startswith("GPU-") and gpu.uuid.startswith(name)


def placements(
    config: RunConfig, gpus: Sequence[Gpu], host: Host = EVERYTHING, named: str | None = None
) -> Iterator[GpuPlacement]:
    """The roles of this host that compute on GPUs.

    Args:
        named: `CUDA_VISIBLE_DEVICES` of this process, which roles inherit.
    """
    ours, engine = visible(gpus, named), config.engine
    rollout, logprob, trainer = config.rollout, config.logprob, config.trainer
    is_served = rollout.engine != "builtin"
    asked = [("trainer", trainer.device, trainer.ranks, 1)]
    asked.append(("logprob", logprob.device, 1, logprob.workers))
    if not is_served:
        asked.append(("rollout", rollout.device, 1, rollout.workers))
    for role, device, ranks, workers in asked:
        if device == CPU or not host.has(role):
            continue
        first = int(device.partition(":")[2] or 0)
        yield GpuPlacement(
            role=role,
            field=f"{role}.device = {device}" + (f" and {ranks - 1} behind it" * (ranks > 1)),
            gpus=ours[first : first + ranks],
            num_wanted=ranks,
            processes=1 if host.is_alone else workers,
        )
    if is_served and not engine.urls and host.has("rollout") and gpus:
        own = engine.env.get(VISIBLE)
        ranks = num_ranks(engine.args)
        yield GpuPlacement(
            role=SERVER,
            field=f"engine.env.{VISIBLE} = {'(not set)' if own is None else own}",
            gpus=visible(gpus, named if own is None else str(own))[:ranks],
            num_wanted=ranks,
            processes=1 if host.is_alone else rollout.workers,
        )


def num_ranks(args: Mapping[str, str | int | float | bool]) -> int:
    """GPUs that one server is spread over, by its arguments; what is no number counts as 1."""
    return max((int(number(args, name) or 1) for name in _RANKS), default=1)


def number(args: Mapping[str, str | int | float | bool], name: str) -> float | None:
    """An argument of a server; None: there is none, or only the server knows what it means.

    A suffix is vLLM's: k, m, g, t are powers of 1000, in capitals of 1024
    (https://docs.vllm.ai/en/stable/cli/serve/).
    """
    plain = {name.lstrip("-").replace("_", "-"): value for name, value in args.items()}
    found = re.fullmatch(r"([0-9.e+-]+)([kmgt]?)", str(plain.get(name, "")).strip(), re.IGNORECASE)
    try:
        value = float(found[1]) if found else None
    except ValueError:
        return None
    if value is None or found is None or not found[2]:
        return value
    base = 1000.0 if found[2].islower() else 1024.0
    return value * math.pow(base, "kmgt".index(found[2].lower()) + 1)


def gpu_checks(
    config: RunConfig, inventory: GpuInventory, host: Host = EVERYTHING, *, weights_mb: float = 0.0
) -> Iterator[Check]:
    """What is there against what is asked for; one of NCCL, and one of those that nobody uses.

    Args:
        weights_mb: size of the model in float32; 0: unknown.
    """
    named = os.environ.get(VISIBLE)
    roles = list(placements(config, inventory.gpus, host, named))
    yield _there(inventory, roles, named)
    if not inventory.gpus or _SLICE in (named or ""):
        return
    if not host.is_alone:
        yield from _unused(config, visible(inventory.gpus, named), roles, weights_mb)
        yield from _pulled_by_nccl(config, roles)


def _there(inventory: GpuInventory, roles: Sequence[GpuPlacement], named: str | None) -> Check:
    wanted = ", ".join(one.field for one in roles)
    where = f"asked for: {wanted}" if wanted else "every role computes on the CPU"
    if inventory.is_broken:
        return warn("gpus", inventory.problem, "fix the driver, or continue without a GPU")
    if inventory.problem:
        found = f"{inventory.problem}; {where}"
        return warn("gpus", found, "name cpu where none is") if wanted else ok("gpus", found)
    hidden = "" if named is None else f" ({VISIBLE}={named!r})"
    found = f"{'; '.join(map(str, inventory.gpus))}{hidden}"
    if _SLICE in (named or ""):
        return warn("gpus", f"{found}: slices of GPUs are not looked at; {where}", "")
    lacking = [one for one in roles if len(one.gpus) < one.num_wanted]
    if not lacking:
        return ok("gpus", f"{found}; {where}")
    return fail(
        "gpus",
        f"there is none for {', '.join(one.field for one in lacking)}; there are: {found}",
        "GPUs are counted from 0 among those that are visible: name one that is there, or cpu, or "
        "lower trainer.ranks",
    )


def _unused(
    config: RunConfig, ours: Sequence[Gpu], roles: Sequence[GpuPlacement], weights_mb: float
) -> Iterator[Check]:
    """GPUs that no role names and that nobody else uses either, as far as their memory tells."""
    used = {gpu.index for one in roles for gpu in one.gpus}
    idle = [
        (place, gpu)
        for place, gpu in enumerate(ours)
        if gpu.index not in used and gpu.free_mb > IDLE * gpu.total_mb
    ]
    if not idle:
        return
    names = ", ".join(f"{gpu.index} ({gpu.name})" for _, gpu in idle)
    found = f"no role uses GPU {names}"
    if 0 < weights_mb < SMALL_MB:
        yield ok("unused gpus", f"{found}; a model of {weights_mb:.1f} MB needs none")
        return
    yield warn("unused gpus", found, _work_for([place for place, _ in idle], config))


def _work_for(places: Sequence[int], config: RunConfig) -> str:
    """Fields that would use them: of roles on the CPU first."""
    devices = {"trainer.device": config.trainer.device, "logprob.device": config.logprob.device}
    if config.rollout.engine == "builtin":
        devices["rollout.device"] = config.rollout.device
    on_cpu = [field for field, device in devices.items() if device == CPU]
    sets = [f'{field} = "cuda:{n}"' for field, n in zip(on_cpu, places, strict=False)]
    if len(sets) == len(places):
        return f"set {', '.join(sets)}"
    more = [
        "trainer.ranks (rank R has the GPU R behind trainer.device)",
        "logprob.device, where it shares a GPU",
    ]
    if config.rollout.engine == "builtin":
        more.append("rollout.device, where it shares one")
    else:
        more.append(f"engine.args.tensor-parallel-size with engine.env.{VISIBLE}")
    rest = f"raise or set {', '.join(more)}; or hide them with {VISIBLE}"
    return f"set {', '.join(sets)}; {rest}" if sets else rest


def _pulled_by_nccl(config: RunConfig, roles: Sequence[GpuPlacement]) -> Iterator[Check]:
    """A puller on the trainer's own GPU: NCCL has one process a device in a communicator."""
    first = next((one.gpus[0] for one in roles if one.role == "trainer" and one.gpus), None)
    if config.weights.channel != "nccl" or first is None:
        return
    shared = [one for one in roles if one.role != "trainer" and first in one.gpus]
    if shared:
        yield fail(
            "weights.channel",
            f"'nccl', but {' and '.join(one.field for one in shared)} means GPU {first.index}, "
            "from which the trainer sends: NCCL refuses two processes on one GPU",
            'name another GPU, or set weights.channel = "file"',
        )
