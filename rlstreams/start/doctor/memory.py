"""Memory that a run's roles need, from the peaks that `infra/docs/models.md` reports.

A role needs copies of the weights, and what was measured beyond them. A model server takes the
share of its GPU that it reserves. Sizes in MB (1e6 bytes).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlstreams.start.doctor.check import Check, Host, fail, ok, warn
from rlstreams.start.doctor.gpus import SERVER, Gpu, GpuPlacement, number
from rlstreams.start.doctor.model import ModelFolder
from rlstreams.workers.config.run import RunConfig

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
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
    copies = config.versions_held + 1 + bool(trainer.loss.kl_coef)
    learning_mb = LEARNING * model.num_parameters / 1e6
    if trainer.lora.rank:
        learning_mb = ADAPTING * weights_mb
    found = [
        ("logprob", logprob.device, copies * weights_mb + _rest(LOGPROB_REST, model)),
        ("trainer", trainer.device, learning_mb / trainer.ranks + _rest(TRAINER_REST, model)),
    ]
    if config.rollout.engine == "builtin":
        found.insert(0, ("rollout", config.rollout.device, 2 * weights_mb))
    return [
        Need(
            role=role,
            processes=host.num_processes(config, role),
            mb=PROCESS_MB + mb,
            is_on_gpu=device != "cpu",
        )
        for role, device, mb in found
        if host.has(role)
    ]


def memory_check(found: Sequence[Need], free_mb: float) -> Check:
    """Roles that compute on the CPU, against the memory that is free."""
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
    parts: dict[Gpu, dict[str, float]] = defaultdict(dict)
    for place in places:
        for gpu in place.gpus:
            each_mb = of_role.get(place.role, 0.0)
            if place.role == SERVER:
                named = (number(config.engine.args, name) for name in FRACTIONS)
                each_mb = (next(filter(None, named), None) or USUAL_FRACTION) * gpu.total_mb
            parts[gpu][place.role] = place.processes * each_mb
    for gpu, by_role in sorted(parts.items(), key=lambda item: item[0].index):
        total_mb, name = sum(by_role.values()), f"gpu {gpu.index} memory"
        told = " + ".join(f"{role} {mb / 1000:.1f}" for role, mb in by_role.items())
        told += f" GB from measured peaks; it has {gpu.total_mb / 1000:.1f} GB"
        if total_mb > gpu.total_mb:
            less = f"{_LESS}; a lower engine.args.{FRACTIONS[config.rollout.engine == 'sglang']}"
            yield warn(name, told, less if SERVER in by_role else _LESS)
        elif total_mb > gpu.free_mb and not is_up:
            told += f", of which {gpu.free_mb / 1000:.1f} are free now"
            yield warn(name, told, "`nvidia-smi` lists who uses it: end them, or name another GPU")
        else:
            yield ok(name, told)


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
