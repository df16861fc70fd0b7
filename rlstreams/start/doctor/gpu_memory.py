"""What the processes on each GPU will hold together, estimated, against what the GPU has.

The formula, for one GPU, MB (1e6 bytes):

    needed = sum over its processes of (CONTEXT_MB + items of that role in `memory.estimate`)
           + sum over its model servers of fraction x total

- Learning takes 16 bytes a weight: weight 4, gradient 4, two moments of Adam 8 in float32; or, with
  weights in 16 bits, weight 2, its lower half 2, gradient 4, moments 8. So does mixed precision in
  ZeRO, section 3.1 (https://arxiv.org/abs/1910.02054).
- Activations: `memory.HIDDEN_ACTIVATIONS` hidden widths and `memory.MLP_ACTIVATIONS` MLP widths a
  layer and token; with activation checkpointing a layer's input, and one layer whole. Logits are
  computed `LOGITS_BYTES` at a time. What was measured against it: `infra/docs/models.md`.
- A server reserves its fraction, whatever the model's size. vLLM: for weights, activations and KV
  cache, and it starts only where that is free (https://docs.vllm.ai/en/stable/api/vllm/config/cache/).
  SGLang: for weights and KV cache (https://docs.sglang.io/advanced_features/server_arguments.html).

Fragmentation, buffers of kernels and of NCCL are not in it: so it warns, and refuses nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rlstreams.start.doctor.check import Check, ok, warn
from rlstreams.start.doctor.gpus import SERVER, VISIBLE, Gpu, GpuPlacement, number, placements
from rlstreams.start.doctor.host import Host
from rlstreams.start.doctor.memory import LESS, RoleMemory
from rlstreams.workers.config.run import RunConfig

CONTEXT_MB = 500.0  # of a process that uses CUDA, before it has a tensor
USUAL_FRACTION = 0.9  # of a server that is told none: 0.9 or 0.92 by version
_FRACTIONS = ("gpu-memory-utilization", "mem-fraction-static")
_CACHE = "kv-cache-memory-bytes"  # vLLM then ignores its fraction
_COPIES = "versions served"  # with snapshot "auto" they lie in host memory where they do not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Who will hold what on one GPU."""

    gpu: Gpu
    parts: dict[str, float] = field(default_factory=dict)  # MB by what to call it
    served_mb: float = 0.0  # of them by model servers
    num_servers: int = 0

    @property
    def needed_mb(self) -> float:
        """Of all together."""
        return sum(self.parts.values())


def gpu_memory_checks(
    config: RunConfig, roles: Sequence[RoleMemory], gpus: Sequence[Gpu], host: Host, *, is_up: bool
) -> Iterator[Check]:
    """One line for each GPU that is used; a warning where the estimate exceeds what it has.

    Args:
        roles: of `memory.estimate`.
        is_up: the run's own processes may be on the GPUs already.
    """
    for load in loads(config, roles, list(placements(config, gpus, host, os.environ.get(VISIBLE)))):
        yield _checked(config, load, is_up=is_up)


def loads(
    config: RunConfig, roles: Sequence[RoleMemory], places: Sequence[GpuPlacement]
) -> Iterator[Load]:
    """By GPU, in the host's order."""
    by_index: dict[int, Load] = {}
    weights = {role.role: _of_role(role, config) for role in roles}
    for place in places:
        for rank, gpu in enumerate(place.gpus):
            load = by_index.setdefault(gpu.index, Load(gpu=gpu))
            if place.role == SERVER:
                name, each = _of_server(config, gpu)
                load = replace(load, served_mb=place.processes * each, num_servers=place.processes)
                by_index[gpu.index] = load
            else:
                name = place.role
                each = weights.get("ranks" if place.role == "trainer" and rank else name, 0.0)
            name = name if place.processes == 1 else f"{place.processes} x {name}"
            load.parts[name] = place.processes * each
    return iter([by_index[index] for index in sorted(by_index)])


def _of_role(role: RoleMemory, config: RunConfig) -> float:
    is_moved = config.weights.snapshot == "auto"
    items = [mb for name, mb in role.on_gpu.items() if not (is_moved and name == _COPIES)]
    return CONTEXT_MB + sum(items)


def _of_server(config: RunConfig, gpu: Gpu) -> tuple[str, float]:
    """What to call it, and MB on one of its GPUs."""
    args = config.engine.args
    kind = config.rollout.engine
    if cache_bytes := number(args, _CACHE):
        return f"{kind} ({_CACHE}, without its weights)", CONTEXT_MB + cache_bytes / 1e6
    told = next(filter(None, (number(args, name) for name in _FRACTIONS)), None)
    fraction = USUAL_FRACTION if told is None else told
    usual = ", as usual where nothing is said" if told is None else ""
    return f"{kind} ({fraction:g} of it{usual})", fraction * gpu.total_mb


def _checked(config: RunConfig, load: Load, *, is_up: bool) -> Check:
    gpu, name = load.gpu, f"gpu {load.gpu.index} memory"
    parts = " + ".join(f"{part} {mb:,.0f}" for part, mb in load.parts.items())
    total = f" = {load.needed_mb:,.0f}" if len(load.parts) > 1 else ""
    found = f"estimate: {parts}{total} MB of {gpu.total_mb:,.0f}"
    if load.needed_mb > gpu.total_mb:
        return warn(name, found, _advice(config, load))
    if load.needed_mb > gpu.free_mb and not is_up:
        return warn(
            name, f"{found}, of which only {gpu.free_mb:,.0f} are free now",
            "`nvidia-smi` lists who uses it: end them, or name another GPU",
        )  # fmt: skip
    return ok(name, found)


def _advice(config: RunConfig, load: Load) -> str:
    others_mb = load.needed_mb - load.served_mb
    room = (load.gpu.total_mb - others_mb) / load.gpu.total_mb
    if load.served_mb and others_mb and room >= 0.1:
        flag = _FRACTIONS[config.rollout.engine == "sglang"]
        each = int(100 * room / load.num_servers) / 100
        return f"set engine.args.{flag} to at most {each:g}, or give the server a GPU of its own"
    learn = "trainer.activation_checkpointing = true, more trainer.ranks, trainer.lora.rank"
    bits = "" if config.model.dtype == "bfloat16" else 'model.dtype = "bfloat16", '
    return f"{LESS}; {bits}{learn}; a GPU for each role; or a smaller model"
