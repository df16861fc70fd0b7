"""The device of the log-prob worker, and its shifts with the trainer on one GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.workers.config.run import AUTO, RunConfig
from rlstreams.workers.config.trainer import MEGATRON
from rlstreams.workers.loop.context import Context

if TYPE_CHECKING:
    from rlstreams.workers.engines.gpu_shifts import GpuShifts

MPS_PIPES, USUAL_PIPES = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"


def placed(config: RunConfig) -> RunConfig:
    """Decide `logprob.device = "auto"` for this host. Call it before a GPU is claimed."""
    device, _ = config.scorer_on(_gpus_for(config))
    return replace(config, logprob=replace(config.logprob, device=device))


def shifts_of(context: Context) -> GpuShifts | None:
    """The shifts in which trainer and log-prob worker share a GPU, for this role; call it before a
    GPU is claimed.

    None: it has its GPU to itself; or has it in longer shifts (`[[devices]]`); or has several
    ranks, which must not wait each for another role; or the driver lets two processes compute at
    once (MPS, https://docs.nvidia.com/deploy/mps/), which is better.
    """
    config = placed(context.config)
    trainer, logprob = config.trainer, config.logprob
    if not config.has_scorer or trainer.device == "cpu" or logprob.device == "cpu":
        return None
    if config.shared_device("trainer") or config.shared_device("logprob"):
        return None
    if trainer.ranks > 1 or logprob.ranks > 1 or MEGATRON in (trainer.backend, logprob.backend):
        return None
    if (Path(os.environ.get(MPS_PIPES, USUAL_PIPES)) / "control").exists():
        return None
    from rlstreams.workers.engines.gpu_shifts import GpuShifts

    own, first = index_of(trainer.device), index_of(logprob.device)
    # A log-prob worker's configuration names its own GPU, the trainer's that of the first.
    num_scorers = logprob.workers if context.role == "trainer" else 1
    if own not in range(first, first + num_scorers):
        return None
    names = _gpus_for(config)
    name = names[own] if own < len(names) else str(own)
    log = context.log
    log.info("gpu_in_shifts", gpu=name, roles=["trainer", "logprob"])
    return GpuShifts(name, lambda why: log.info("gpu_not_given_back", why=why))


def index_of(device: str) -> int:
    """Index of the device `cuda` or `cuda:N`."""
    return int(device.partition(":")[2] or 0)


def _gpus_for(config: RunConfig) -> list[str]:
    """GPUs to choose from; none, without a look, where there is nothing to choose."""
    if config.trainer.device == "cpu" and config.logprob.device in ("cpu", AUTO):
        return []
    from rlstreams.workers.model.device import visible_gpus

    return visible_gpus()
