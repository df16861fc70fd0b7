"""Profile of a recorded step: a trace of its re-execution, and the kernels that take longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlstreams.debug.rerun.rebuilt import rebuilt
from rlstreams.debug.rerun.rerun import State
from rlstreams.streams.log.bus import Bus
from rlstreams.workers.config.run import RunConfig

_HEAVIEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One step's; of several ranks rank 0's."""

    is_equal: bool  # the profiled step made the recorded weights
    seconds: float  # of the step, the profiler's own work included
    heaviest: tuple[tuple[str, int, float], ...]  # kernel, calls, seconds

    def lines(self, step: int, out: Path) -> list[str]:
        """For the terminal."""
        same = "the recorded weights" if self.is_equal else "OTHER weights than the recorded ones"
        return [
            f"{'seconds':>9} {'calls':>7}  the kernels of step {step} that take longest",
            *(f"{own_s:>9.4f} {calls:>7}  {name[:100]}" for name, calls, own_s in self.heaviest),
            f"the step took {self.seconds:.3f} s under the profiler and made {same}; trace: {out}",
        ]


def profile(
    bus: Bus, config: RunConfig, step: int, *, checkpoints: Sequence[Path], out: Path
) -> Profile:
    """Do the step twice, the second time under `torch.profiler`: compiling is not in it.

    Args:
        out: for the trace, in Chrome's JSON.

    Raises:
        RerunError, RetentionError, OffsetGoneError: as `rerun`.
        OSError: `out` cannot be written.
    """
    with rebuilt(bus, config, step, step, checkpoints=checkpoints) as before:
        before.go_to(step - 1)
        state = State(before.training, step - 1)
        before.again(step)
        state.back()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as found:
            again = before.again(step)
    found.export_chrome_trace(str(out))

    def own_us(row: torch.autograd.profiler_util.FunctionEventAvg) -> float:
        return float(row.self_device_time_total or row.self_cpu_time_total)

    on_gpu = [row for row in found.key_averages() if row.self_device_time_total]
    rows = sorted(on_gpu or found.key_averages(), key=own_us, reverse=True)[:_HEAVIEST]
    return Profile(
        is_equal=again.is_equal,
        seconds=again.again.seconds,
        heaviest=tuple((row.key, row.count, own_us(row) / 1e6) for row in rows),
    )
