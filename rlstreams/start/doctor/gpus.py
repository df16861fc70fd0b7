"""Checks of the GPUs: which this host has, and whether those that the roles name are there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlstreams.start.doctor.check import EVERYTHING, Check, Host, fail, ok, warn
from rlstreams.workers.config.run import RunConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK_S = 5.0
MIB = 1.048576  # MB
SERVER = "server"  # as a role: the model server that a rollout worker starts
_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.free,memory.total",
          "--format=csv,noheader,nounits"]  # fmt: skip
_SLICE = "MIG-"  # how one is named where a GPU would be
_RANKS = ("tensor-parallel-size", "tp-size", "tp")  # GPUs of a server, in both spellings


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as the driver lists it."""

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
        found = [g for g in gpus if name == str(g.index)]
        found += [g for g in gpus if name.startswith("GPU-") and g.uuid.startswith(name)]
        if len(found) != 1:
            break
        left += found
    return tuple(left)


def placements(
    config: RunConfig, gpus: Sequence[Gpu], host: Host = EVERYTHING, named: str | None = None
) -> Iterator[GpuPlacement]:
    """The roles of this host that compute on GPUs.

    Args:
        named: `CUDA_VISIBLE_DEVICES` of this process, which roles inherit.
    """
    ours, engine = visible(gpus, named), config.engine
    is_served = config.rollout.engine != "builtin"
    asked = [
        ("trainer", config.trainer.device, config.trainer.ranks),
        ("logprob", config.logprob.device, 1),
        ("rollout", "cpu" if is_served else config.rollout.device, 1),
    ]
    for role, device, ranks in asked:
        if device == "cpu" or not host.has(role):
            continue
        first = int(device.partition(":")[2] or 0)
        yield GpuPlacement(
            role=role,
            field=f"{role}.device = {device}" + (f" and {ranks - 1} behind it" * (ranks > 1)),
            gpus=ours[first : first + ranks],
            num_wanted=ranks,
            processes=host.num_processes(config, role),
        )
    if is_served and not engine.urls and host.has("rollout") and gpus:
        own = engine.env.get(VISIBLE)
        ranks = max(int(number(engine.args, name) or 1) for name in _RANKS)
        yield GpuPlacement(
            role=SERVER,
            field=f"engine.env.{VISIBLE} = {'(not set)' if own is None else own}",
            gpus=visible(gpus, named if own is None else str(own))[:ranks],
            num_wanted=ranks,
            processes=host.num_processes(config, "rollout"),
        )


def number(args: Mapping[str, str | int | float | bool], name: str) -> float | None:
    """An argument of a server; None: there is none, or only the server knows what it means."""
    plain = {key.lstrip("-").replace("_", "-"): value for key, value in args.items()}
    try:
        return float(plain[name])
    except (KeyError, ValueError):
        return None


def gpu_checks(
    inventory: GpuInventory, roles: Sequence[GpuPlacement], *, nccl: bool = False
) -> Iterator[Check]:
    """What is there against what is asked for.

    Args:
        roles: of `placements`.
        nccl: weights go to the other roles through NCCL, which refuses two processes on one GPU.
    """
    wanted = ", ".join(one.field for one in roles)
    where = f"asked for: {wanted}" if wanted else "every role computes on the CPU"
    named = os.environ.get(VISIBLE)
    lacking = [one.field for one in roles if len(one.gpus) < one.num_wanted]
    hidden = "" if named is None else f" ({VISIBLE}={named!r})"
    found = "; ".join(map(str, inventory.gpus)) + hidden
    if inventory.is_broken:
        yield warn("gpus", inventory.problem, "fix the driver, or continue without a GPU")
    elif inventory.problem:
        told = f"{inventory.problem}; {where}"
        yield warn("gpus", told, "name cpu where none is") if wanted else ok("gpus", told)
    elif _SLICE in (named or ""):
        yield warn("gpus", f"{found}: slices of GPUs are not looked at; {where}", "")
    elif lacking:
        yield fail(
            "gpus",
            f"there is none for {', '.join(lacking)}; there are: {found}",
            "GPUs are counted from 0 among those that are visible: name one that is there, or cpu, "
            "or lower trainer.ranks",
        )
    else:
        yield ok("gpus", f"{found}; {where}")
    sender = next((one.gpus[0] for one in roles if one.role == "trainer" and one.gpus), None)
    shared = [one.field for one in roles if one.role != "trainer" and sender in one.gpus]
    if nccl and shared:
        yield fail(
            "weights.channel",
            f"'nccl', but {' and '.join(shared)} means the GPU from which the trainer sends: NCCL "
            "refuses two processes on one GPU",
            'name another GPU, or set weights.channel = "file"',
        )
