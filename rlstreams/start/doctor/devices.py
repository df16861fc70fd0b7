"""What the roles compute on: the GPUs that they name, and the memory that they need there or here.

A role needs copies of the weights, and what was measured beyond them: the peaks that
`infra/docs/models.md` reports. A model server takes the share of its GPU that it reserves. Sizes in
MB (1e6 bytes).
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlstreams.start.doctor.check import EVERYTHING, Check, Host, fail, ok, warn
from rlstreams.start.doctor.model import ModelFolder
from rlstreams.workers.config.engine import NAMED_CACHE, VISIBLE
from rlstreams.workers.config.run import LogprobSection, RunConfig
from rlstreams.workers.engines.served.process import GRACE_S

ASK_S = 5.0
MIB = 1.048576  # MB
SERVER = "server"  # as a role: the model server that a rollout worker starts
_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.free,memory.total",
          "--format=csv,noheader,nounits"]  # fmt: skip
_SLICE = "MIG-"  # how one is named where a GPU would be
PROCESS_MB = 450.0  # a process with torch, before it has a model
ADAPTING = 1.3  # copies of the weights with adapters, the peak while they are hashed
LEARNING = 16  # bytes a weight, in float32 and in bfloat16: weight, gradient and two moments
# Measured beyond the weights, MB, from so many weights on; "What one GPU can train" and "Memory".
TRAINER_REST = ((11e6, 1400.0), (1.7e9, 5100.0), (4.0e9, 6400.0), (8.2e9, 10_000.0))
LOGPROB_REST = ((11e6, 1050.0),)
FRACTIONS = ("gpu-memory-utilization", "mem-fraction-static")
USUAL_FRACTION = 0.9
_LESS = 'fewer versions held, model.dtype = "bfloat16", trainer.activation_checkpointing = true, '
_LESS += "more trainer.ranks, trainer.lora.rank, a device for each role, or a smaller model"
_TAKEN = "`nvidia-smi` lists who uses it: end them, or name another GPU; the server of a worker "
_TAKEN += f"that was killed ends by itself after {GRACE_S:g} s"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as the driver lists it."""

    index: int  # of the host, whatever is hidden
    uuid: str
    name: str
    free_mb: float
    total_mb: float

    def __str__(self) -> str:
        return f"{self.index}: {self.name}, {self.free_mb:,.0f} of {self.total_mb:,.0f} MB free"


class GpuInventory(NamedTuple):
    """What the driver says."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""  # why there are none
    is_broken: bool = False  # the driver fails, rather than that there is none


class GpuPlacement(NamedTuple):
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
        return GpuInventory(tuple(_gpu(line) for line in done.stdout.strip().splitlines()))
    except ValueError as err:  # a kind that does not tell its memory
        return GpuInventory(problem=f"nvidia-smi cannot be understood: {err}", is_broken=True)


def _gpu(line: str) -> Gpu:
    index, uuid, name, free, total = (cell.strip() for cell in line.split(","))
    return Gpu(int(index), uuid, name, MIB * int(free), MIB * int(total))


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
    num_servers = config.rollout.workers * engine.servers
    is_served = config.rollout.engine != "builtin"
    logprob = config.logprob if config.logprob.place == "separate" else LogprobSection()
    replicas = host.num_processes(config, "logprob")
    samplers = host.num_processes(config, "rollout")
    asked = [
        ("trainer", config.trainer.device, config.trainer.ranks, 1),
        ("logprob", logprob.device, replicas * logprob.ranks, 1),
        ("rollout", "cpu" if is_served else config.rollout.device, 1, samplers),
    ]
    for role, device, ranks, processes in asked:
        if device == "cpu" or not host.has(role):
            continue
        first = int(device.partition(":")[2] or 0)
        field = f"{role}.device = {device}" + f" and {ranks - 1} behind it" * (ranks > 1)
        yield GpuPlacement(role, field, ours[first : first + ranks], ranks, processes)
    if is_served and not engine.urls and host.has("rollout") and gpus:
        own = engine.env.get(VISIBLE)
        field = f"engine.env.{VISIBLE} = {'(not set)' if own is None else own}"
        first = (host.ordinal or 0) * engine.servers
        of_each = [
            visible(gpus, named if (its := engine.visible(n, num_servers)) is None else its)
            for n in range(first, first + samplers * engine.servers)
        ]
        times = Counter(gpu for left in of_each for gpu in left[: engine.gpus_of_one])
        lacks = any(len(left) < engine.gpus_of_one for left in of_each)
        for processes in sorted({*times.values()} or {1}):
            theirs = tuple(gpu for gpu in times if times[gpu] == processes)
            yield GpuPlacement(SERVER, field, theirs, len(theirs) + lacks, processes)


def number(args: Mapping[str, str | int | float | bool], name: str) -> float | None:
    """An argument of a server; None: there is none, or only the server knows what it means."""
    plain = {key.lstrip("-").replace("_", "-"): value for key, value in args.items()}
    try:
        return float(plain[name])
    except (KeyError, ValueError):
        return None


def gpu_checks(inventory: GpuInventory, roles: Sequence[GpuPlacement]) -> Iterator[Check]:
    """What is there against what is asked for.

    Args:
        roles: of `placements`.
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
            "or lower the ranks",
        )
    else:
        yield ok("gpus", f"{found}; {where}")


class Need(NamedTuple):
    """What one process of a role holds, where it computes."""

    role: str
    processes: int
    mb: float
    is_on_gpu: bool

    def __str__(self) -> str:
        times = f"{self.processes} x " if self.processes > 1 else ""
        return f"{times}{self.role} {self.mb / 1000:.1f}"


def needs(model: ModelFolder, config: RunConfig, host: Host) -> list[Need]:
    """The roles of this host that load the model."""
    weights_mb = model.mb_in(config.model.dtype)
    trainer, logprob = config.trainer, config.logprob
    is_separate = logprob.place == "separate"
    compares = bool(trainer.loss.why_compared)
    copies_mb = (config.versions_held + 1 + compares) * weights_mb / logprob.ranks
    learning_mb = LEARNING * model.num_parameters / 1e6
    if trainer.lora.rank:
        learning_mb = ADAPTING * weights_mb
    learning_mb += weights_mb * (compares and not is_separate)
    found = [
        ("trainer", trainer.device, learning_mb / trainer.ranks + _rest(TRAINER_REST, model)),
    ]
    if is_separate:
        found.insert(0, ("logprob", logprob.device, copies_mb + _rest(LOGPROB_REST, model)))
    if config.rollout.engine == "builtin":
        found.insert(0, ("rollout", config.rollout.device, 2 * weights_mb))
    return [
        Need(role, host.num_processes(config, role), PROCESS_MB + mb, device != "cpu")
        for role, device, mb in found
        if host.has(role)
    ]


def off_loads(config: RunConfig, found: Sequence[Need]) -> list[Need]:
    """What roles that share GPUs keep in pinned host memory while others have their turn; at most
    what they hold there. A server keeps nothing: its weights come anew."""
    ranks = {"trainer": config.trainer.ranks, "logprob": config.logprob.ranks}
    return [
        Need(f"{need.role} off-loaded", ranks[need.role], need.mb, is_on_gpu=False)
        for need in found
        if need.is_on_gpu and need.role in ranks and config.shared_device(need.role)
    ]


def memory_check(found: Sequence[Need], free_mb: float) -> Check:
    """Roles that compute on the CPU, and what is off-loaded, against the memory that is free."""
    here = [need for need in found if not need.is_on_gpu]
    total_mb = sum(need.processes * need.mb for need in here)
    told = f"{' + '.join(map(str, here)) or 'no role computes here'}, from measured peaks; "
    told += f"{free_mb / 1000:.1f} GB are free"
    if any(need.mb > free_mb for need in here):
        return fail("memory", told, _LESS)
    return warn("memory", told, _LESS) if total_mb > free_mb else ok("memory", told)


def gpu_memory_checks(
    config: RunConfig, found: Sequence[Need], places: Sequence[GpuPlacement], *, is_up: bool
) -> Iterator[Check]:
    """One check for each GPU that is used.

    Args:
        is_up: the run's own processes may be on the GPUs already.
    """
    of_role = {need.role: need.mb for need in found if need.is_on_gpu}
    parts: dict[Gpu, list[Need]] = defaultdict(list)
    for place in places:
        for gpu in place.gpus:
            each_mb = of_role.get(place.role, 0.0)
            if place.role == SERVER:
                each_mb = _server_mb(config, gpu)
            parts[gpu].append(Need(place.role, place.processes, each_mb, is_on_gpu=True))
    for gpu, all_there in sorted(parts.items(), key=lambda item: item[0].index):
        by_turns = {
            need.role: need.processes * need.mb
            for need in all_there
            if config.shared_device("rollout" if need.role == SERVER else need.role)
        }
        total_mb = sum(need.processes * need.mb for need in all_there) - sum(by_turns.values())
        total_mb += max(by_turns.values(), default=0.0)
        name = f"gpu {gpu.index} memory"
        told = " + ".join(map(str, all_there))
        told += f" ({', '.join(by_turns)} by turns)" if by_turns else ""
        told += f" GB from measured peaks; it has {gpu.total_mb / 1000:.1f} GB"
        if total_mb > gpu.total_mb:
            less = f"{_LESS}; a lower engine.args.{FRACTIONS[config.rollout.engine == 'sglang']}"
            has_server = any(need.role == SERVER for need in all_there)
            yield warn(name, told, less if has_server else _LESS)
        elif total_mb > gpu.free_mb and not is_up:
            told += f", of which {gpu.free_mb / 1000:.1f} are free now"
            yield warn(name, told, _TAKEN)
        else:
            yield ok(name, told)


def _server_mb(config: RunConfig, gpu: Gpu) -> float:
    """The share that a server asks for as it starts, or a cache of a size that was named."""
    named = (number(config.engine.args, name) for name in FRACTIONS)
    share_mb = (next(filter(None, named), None) or USUAL_FRACTION) * gpu.total_mb
    return max(share_mb, (number(config.engine.args, NAMED_CACHE) or 0.0) / 1e6)


def free_mb() -> float:
    """Memory that can be had without swapping; the whole of it where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 / 1e6
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6


def _rest(rows: Sequence[tuple[float, float]], model: ModelFolder) -> float:
    return max((mb for size, mb in rows if model.num_parameters >= 0.99 * size), default=0.0)
