"""Where one GPU spends a step: kernels that compute, exchanges, what overlaps, what is idle.

An exchange is a kernel of NCCL; it also waits there for the slower rank. `compute_s` sums the other
kernels: with exchanges beside them they take longer, so compare it, bin for bin, with one GPU's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType

GAPS = 8  # longest ones that are told
KERNELS = 12  # the same
_KINDS = {"AllGather": "gather", "ReduceScatter": "sum", "AllReduce": "all_reduce"}


class Kernel(NamedTuple):
    """One kernel or copy; microseconds."""

    start: float
    end: float
    name: str

    @property
    def exchange(self) -> str:
        """Its kind, if it is an exchange between ranks; else ""."""
        if not self.name.startswith(("ncclDevKernel", "ncclKernel")):
            return ""
        return next((own for word, own in _KINDS.items() if word in self.name), "other")


Spans = list[tuple[float, float]]


def joined(kernels: Iterable[Kernel]) -> Spans:
    """Times in which any of these runs, in order and apart."""
    found: Spans = []
    for start, end, _ in sorted(kernels):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length(spans: Spans) -> float:
    """Microseconds."""
    return sum(end - start for start, end in spans)


def alone(spans: Spans, others: Spans) -> float:
    """Microseconds of `spans` in which none of `others` runs."""
    shared, at = 0.0, 0
    for start, end in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        here = at
        while here < len(others) and others[here][0] < end:
            shared += min(end, others[here][1]) - max(start, others[here][0])
            here += 1
    return length(spans) - shared


def taken_apart(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Seconds of one step's kernels, the longest gaps, and the kernels that take longest."""
    exchanges = [kernel for kernel in kernels if kernel.exchange]
    computing = [kernel for kernel in kernels if not kernel.exchange]
    computes, every = joined(computing), joined(kernels)
    first, last = every[0][0], every[-1][1]
    told: dict[str, Any] = {
        "span_s": _s(last - first),
        "compute_s": _s(sum(end - start for start, end, _ in computing)),
        "computing_s": _s(length(computes)),
        "exchanges_s": _s(length(joined(exchanges))),
        "exchanges_alone_s": _s(alone(joined(exchanges), computes)),
        "idle_s": _s(last - first - length(every)),
    }
    for kind in sorted({kernel.exchange for kernel in exchanges}):
        own = [kernel for kernel in exchanges if kernel.exchange == kind]
        told[kind] = {
            "number": len(own),
            "seconds": _s(length(joined(own))),
            "alone_s": _s(alone(joined(own), computes)),
        }
    told["gaps"] = _gaps(kernels, first)
    told["kernels"] = _longest(kernels)
    return told


def _gaps(kernels: Sequence[Kernel], first: float) -> list[str]:
    """The longest times in which nothing runs: milliseconds, when, and between which kernels."""
    found: list[tuple[float, Kernel, Kernel]] = []
    before: Kernel | None = None
    for kernel in sorted(kernels):
        if before is not None and kernel.start > before.end:
            found.append((kernel.start - before.end, before, kernel))
        if before is None or kernel.end > before.end:
            before = kernel
    return [
        f"{gap / 1e3:8.2f} at {(one.end - first) / 1e3:9.1f}  {one.name[:50]} | {other.name[:50]}"
        for gap, one, other in sorted(found, reverse=True)[:GAPS]
    ]


def _longest(kernels: Sequence[Kernel]) -> list[str]:
    """Milliseconds, calls, name."""
    sums: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for start, end, name in kernels:
        sums[name] += end - start
        calls[name] += 1
    most = sorted(sums, key=lambda name: -sums[name])[:KERNELS]
    return [f"{sums[name] / 1e3:9.1f} {calls[name]:6d} {name[:90]}" for name in most]


def traced(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """What `work` gives, and its kernels taken apart; on a CPU no kernels."""
    activity = torch.profiler.ProfilerActivity.CUDA
    if not torch.cuda.is_available():
        return work(), {}
    with torch.profiler.profile(activities=[activity]) as profile:
        result = work()
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == DeviceType.CUDA and not _is_note(event)
    ]
    return result, taken_apart(kernels) if kernels else {}


def _is_note(event: Any) -> bool:
    """Whether it is a name for a stretch of kernels, which a library gave, and no kernel."""
    is_noted = getattr(event, "is_user_annotation", False)
    return is_noted or event.name.startswith(("nccl:", "FSDP::"))


def _s(microseconds: float) -> float:
    return round(microseconds / 1e6, 5)
