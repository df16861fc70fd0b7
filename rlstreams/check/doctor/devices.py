"""Devices of the roles: the GPUs that they name, and the memory that they need on each device.

A role needs copies of the weights, and what was measured beyond them: the peaks that
`infra/docs/models.md` reports. A model server takes the share of its GPU that it reserves. Sizes in
MB (1e6 bytes).
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlstreams.check.doctor.check import EVERYTHING, Check, Host, Level, fail, ok, warn
from rlstreams.check.doctor.model import ModelFolder
from rlstreams.workers.config.engine import NAMED_CACHE, VISIBLE
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.trainer import MEGATRON

ASK_S = 5.0
MIB = 1.048576  # MB
SERVER = "server"
_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.free,memory.total",
          "--format=csv,noheader,nounits"]  # fmt: skip
_SLICE = "MIG-"  # begins the name of a slice in place of a GPU's
PROCESS_MB = 450.0  # a process with torch, before it has a model
ADAPTING = 1.3  # copies of the weights with adapters, the peak while they are hashed
LEARNING = 16  # bytes a weight, in float32 and in bfloat16: weight, gradient and two moments
MOMENTS_ALONE = "with two moments as of AdamW, whatever state trainer.optimizer.kind keeps"
# Measured beyond the weights, MB, from so many weights on; "What one GPU can train" and "Memory".
TRAINER_REST = ((11e6, 1400.0), (1.7e9, 5100.0), (4.0e9, 6400.0), (8.2e9, 10_000.0))
LOGPROB_REST = ((11e6, 1050.0),)
FRACTIONS = ("gpu-memory-utilization", "mem-fraction-static")
USUAL_FRACTION = 0.9
# Of a control group, version 1 and 2: its limit, what it uses, and what of that only caches files.
_GROUP = (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
          ("memory.max", "memory.current", "inactive_file"))  # fmt: skip
_LESS = 'fewer versions held, model.dtype = "bfloat16", trainer.activation_checkpointing = true, '
_LESS += "more trainer.ranks, trainer.lora.rank, a device for each role, or a smaller model"
_APART = "logprob.device on another GPU, lower logprob.versions_held or logprob.token_budget; "
_IDLE = "to use it: `rlstreams init DIR --from gsm8k --gpus 1` writes a run with vLLM that does"
_TAKEN = "`nvidia-smi` lists who uses it: end them, or name another GPU"


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


class Placement(NamedTuple):
    """The devices on which a role of this host computes."""

    role: str
    field: str  # of the configuration that names them, with its value
    gpus: tuple[Gpu, ...]  # those that are there
    num_wanted: int  # GPUs; 0: it computes on the CPU
    processes: int  # on each of them, or on the CPU


class Need(NamedTuple):
    """Memory that the processes of a role need on one device, `mb` each."""

    role: str
    processes: int
    mb: float

    def __str__(self) -> str:
        times = f"{self.processes} x " if self.processes > 1 else ""
        return f"{times}{self.role} {self.mb / 1000:.1f}"


def gpu_inventory() -> tuple[tuple[Gpu, ...], str]:
    """All GPUs of this host, and why there are none.

    Asked of `nvidia-smi`: torch would take seconds to import.
    """
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=ASK_S, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            return (), f"nvidia-smi fails: {said[-1] if said else done.returncode}"
        return tuple(_gpu(line) for line in done.stdout.strip().splitlines()), ""
    except (OSError, subprocess.TimeoutExpired):
        return (), "none found (no nvidia-smi)"
    except ValueError as err:  # a kind that does not report its memory
        return (), f"nvidia-smi cannot be understood: {err}"


def _gpu(line: str) -> Gpu:
    index, uuid, name, free, total = (cell.strip() for cell in line.split(","))
    return Gpu(int(index), uuid, name, MIB * int(free), MIB * int(total))


def visible(gpus: Sequence[Gpu], named: str | None) -> tuple[Gpu, ...]:
    """GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order; an unknown name ends the list.

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
) -> Iterator[Placement]:
    """The roles of this host that load the model, and the model servers that it starts.

    Args:
        named: `CUDA_VISIBLE_DEVICES` of this process, which roles inherit.
    """
    ours, engine = visible(gpus, named), config.engine
    samplers, replicas = (host.num_processes(config, role) for role in ("rollout", "logprob"))
    asked = [("trainer", config.trainer.device, config.trainer.ranks_here, 1)]
    scorer, why = config.scorer_on([str(gpu.index) for gpu in ours])
    if config.has_scorer:
        asked.insert(0, ("logprob", scorer, config.logprob.ranks * replicas, 1))
    if not config.is_served:
        asked.insert(0, ("rollout", config.rollout.device, 1, samplers))
    for role, device, ranks, processes in asked:
        if not host.has(role):
            continue
        if device == "cpu":
            yield Placement(role, "", (), 0, host.num_processes(config, role))
            continue
        first = int(device.partition(":")[2] or 0)
        field = f"{role}.device = {device}" + f" and {ranks - 1} behind it" * (ranks > 1)
        field += f" (auto: {why})" if role == "logprob" and why else ""
        yield Placement(role, field, ours[first : first + ranks], ranks, processes)
    if config.is_served and not engine.urls and host.has(SERVER) and gpus:
        own, num_servers = engine.env.get(VISIBLE), config.rollout.workers * engine.servers
        field = f"engine.env.{VISIBLE} = {'(not set)' if own is None else own}"
        first = host.ordinal or 0
        of_each = [
            visible(gpus, named if (its := engine.visible(n, num_servers)) is None else its)
            for n in range(first, first + host.num_processes(config, SERVER))
        ]
        times = Counter(gpu for left in of_each for gpu in left[: engine.gpus_of_one])
        lacks = any(len(left) < engine.gpus_of_one for left in of_each)
        for processes in sorted({*times.values()} or {1}):
            theirs = tuple(gpu for gpu in times if times[gpu] == processes)
            yield Placement(SERVER, field, theirs, len(theirs) + lacks, processes)


def number(args: Mapping[str, str | int | float | bool], name: str) -> float | None:
    """An argument of a server; None: there is none, or only the server knows what it means."""
    plain = {key.lstrip("-").replace("_", "-"): value for key, value in args.items()}
    try:
        return float(plain[name])
    except (KeyError, ValueError):
        return None


def gpu_check(gpus: Sequence[Gpu], problem: str, roles: Sequence[Placement]) -> Check:
    """Compare the GPUs of this host with those that the roles ask for.

    Args:
        gpus, problem: of `gpu_inventory`.
        roles: of `placements`.
    """
    wanted = ", ".join(one.field for one in roles if one.num_wanted)
    where = f"asked for: {wanted}" if wanted else "every role computes on the CPU"
    named = os.environ.get(VISIBLE)
    lacking = [one.field for one in roles if len(one.gpus) < one.num_wanted]
    hidden = "" if named is None else f" ({VISIBLE}={named!r})"
    found = "; ".join(map(str, gpus)) + hidden
    if problem and wanted:
        # A container may have a GPU and no nvidia-smi: then only the workers can find it.
        is_there = any(Path("/dev").glob("nvidia[0-9]*"))
        say = warn if is_there else fail
        return say("gpus", f"{problem}; {where}", "name cpu where none is, or mend the driver")
    if problem:
        return ok("gpus", f"{problem}; {where}")
    if _SLICE in (named or ""):
        return warn("gpus", f"{found}: slices of GPUs are not looked at; {where}", "")
    if lacking:
        return fail(
            "gpus",
            f"there is none for {', '.join(lacking)}; there are: {found}",
            "GPUs are counted from 0 among those that are visible: name one that is there, or cpu, "
            "or lower the ranks",
        )
    is_idle = bool(gpus) and not wanted
    return Check(
        name="gpus",
        level=Level.OK,
        found=f"{found}; {where}",
        advice=_IDLE if is_idle else "",
    )


def sizes(model: ModelFolder, config: RunConfig) -> dict[str, float]:
    """MB that one process of each role holds where it computes, by measured peaks."""
    weights_mb = model.mb_in(config.model.dtype)
    trainer, logprob = config.trainer, config.logprob
    compares = bool(trainer.loss.why_compared)
    layout = logprob.layout
    shares = layout.tp * layout.pp if logprob.backend == MEGATRON else logprob.ranks
    held = config.versions_held and config.versions_held + 1  # one more arrives
    copies_mb = (held + compares) * weights_mb / shares
    learning_mb = LEARNING * model.num_parameters / 1e6
    if trainer.lora.rank:
        learning_mb = ADAPTING * weights_mb
    return {
        "rollout": PROCESS_MB + 2 * weights_mb,
        "logprob": PROCESS_MB + copies_mb + _rest(LOGPROB_REST, model),
        "trainer": PROCESS_MB + learning_mb / trainer.ranks + _rest(TRAINER_REST, model),
    }


def memory_checks(
    config: RunConfig,
    model: ModelFolder,
    places: Sequence[Placement],
    free_mb: float,
    *,
    is_up: bool,
) -> Iterator[Check]:
    """One check for the host, and one for each GPU that is used.

    Roles that share GPUs keep in pinned host memory, while others have theirs, at most what
    they hold there. A server keeps nothing: its weights come anew.

    Args:
        free_mb: of the host.
        is_up: the run's own processes may be on the GPUs already.
    """
    by_role = sizes(model, config)
    ranks = {"trainer": config.trainer.ranks_here, "logprob": config.logprob.ranks}
    here: list[Need] = []
    on: defaultdict[Gpu, list[Need]] = defaultdict(list)
    for role, _, gpus, num_wanted, processes in places:
        if not num_wanted:
            here.append(Need(role, processes, by_role[role]))
        elif role in ranks and config.shared_device(role):
            here.append(Need(f"{role} off-loaded", ranks[role], by_role[role]))
        for gpu in gpus:
            each_mb = _server_mb(config, gpu) if role == SERVER else by_role[role]
            on[gpu].append(Need(role, processes, each_mb))
    yield _host_memory(config, here, free_mb)
    for gpu in sorted(on, key=lambda gpu: gpu.index):
        yield _gpu_memory(config, gpu, on[gpu], is_up=is_up)


def _measured(config: RunConfig, needs: Sequence[Need]) -> str:
    """The origin of these needs, with what they leave out."""
    trainer = config.trainer
    is_others = trainer.optimizer.is_own and not trainer.lora.rank
    if not is_others or not any(need.role.startswith("trainer") for need in needs):
        return "from measured peaks"
    return f"from measured peaks, {MOMENTS_ALONE}"


def _host_memory(config: RunConfig, here: Sequence[Need], free_mb: float) -> Check:
    needs = f"{' + '.join(map(str, here))} GB {_measured(config, here)}"
    text = f"{needs if here else 'no role computes here'}; {free_mb / 1000:.1f} GB are free"
    if any(need.mb > free_mb for need in here):
        return fail("memory", text, _LESS)
    total_mb = sum(need.processes * need.mb for need in here)
    return warn("memory", text, _LESS) if total_mb > free_mb else ok("memory", text)


def _gpu_memory(config: RunConfig, gpu: Gpu, there: Sequence[Need], *, is_up: bool) -> Check:
    in_shifts = {
        need.role: need.processes * need.mb
        for need in there
        if config.shared_device("rollout" if need.role == SERVER else need.role)
    }
    total_mb = sum(need.processes * need.mb for need in there) - sum(in_shifts.values())
    total_mb += max(in_shifts.values(), default=0.0)
    name, text = f"gpu {gpu.index} memory", " + ".join(map(str, there))
    text += f" ({', '.join(in_shifts)} in shifts)" if in_shifts else ""
    text += f" GB {_measured(config, there)}; it has {gpu.total_mb / 1000:.1f} GB"
    if total_mb > gpu.total_mb:
        roles = {need.role for need in there}
        less = _APART * (len(roles) > 1 and "logprob" in roles) + _LESS
        fraction = f"; a lower engine.args.{FRACTIONS[config.rollout.engine == 'sglang']}"
        return warn(name, text, less + fraction * (SERVER in roles))
    if total_mb > gpu.free_mb and not is_up:
        text += f", of which {gpu.free_mb / 1000:.1f} are free now"
        return warn(name, text, _TAKEN)
    return ok(name, text)


def _server_mb(config: RunConfig, gpu: Gpu) -> float:
    """The share that a server asks for as it starts, or a cache of a size that was named."""
    named = (number(config.engine.args, name) for name in FRACTIONS)
    share_mb = (next(filter(None, named), None) or USUAL_FRACTION) * gpu.total_mb
    return max(share_mb, (number(config.engine.args, NAMED_CACHE) or 0.0) / 1e6)


def free_mb() -> float:
    """Memory that can be had without swapping; the whole of it where the system does not say."""
    host_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                host_mb = int(line.split()[1]) * 1024 / 1e6
    return min(host_mb, group_mb())


def group_mb(
    member: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")
) -> float:
    """Memory that the control groups of this process leave it: a container's limit; inf: no limit.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and `cgroup-v1/memory.html` there.
    """
    left_bytes = math.inf
    try:
        lines = member.read_text(encoding="utf-8").splitlines()
    except OSError:
        return left_bytes
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        top = groups / "memory" if controllers else groups
        limits = [top]  # a container has its own group there
        for name in path.strip("/").split("/"):
            limits.append(limits[-1] / name)
        left_bytes = min(
            left_bytes, *(_left_bytes(one, *_GROUP[not controllers]) for one in limits)
        )
    return left_bytes / 1e6


def _left_bytes(group: Path, limit: str, used: str, cached: str) -> float:
    """Memory below one group's limit; what only caches files can be had."""
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        cached_bytes = int(dict(line.split(" ", 1) for line in lines)[cached])
        limit_bytes, used_bytes = (int((group / name).read_text()) for name in (limit, used))
    except (OSError, ValueError, KeyError):  # it is not there, or its limit is `max`
        return math.inf
    return limit_bytes - used_bytes + cached_bytes


def _rest(rows: Sequence[tuple[float, float]], model: ModelFolder) -> float:
    return max((mb for size, mb in rows if model.num_parameters >= 0.99 * size), default=0.0)
