"""A checkpoint's copy to the host: its seconds, and how long the card's other users wait for it.

    python -m tests.gpu.host_copies --out result.json    # 4 GB, on one GPU, under a minute

`plain` copies each tensor by `Tensor.to("cpu")`, `pieces` as the trainer does, through pinned
pieces (`weights/host_copies.py`). Meanwhile a second thread orders small kernels on a stream of its
own, as the sender of weights does, and waits for each: `longest_wait_s`, beside `alone`, without a
copy. Both copies are compared with the tensors, bit for bit. Each is done twice, the second counts.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rlstreams.workers.weights.host_copies import host_copies
from tests.bench.hardware import hardware
from tests.gpu.result import kept
from tests.gpu.train_step import timed

ALONE_S = 1.0
Copies = Mapping[str, Tensor]


def plain(tensors: Copies) -> Copies:
    """Each tensor copied straight into ordinary memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


@contextmanager
def another_user(device: str, waits_s: list[float]) -> Iterator[None]:
    """A thread that orders one small kernel after another, and notes how long each took."""
    stream = torch.cuda.Stream() if device == "cuda" else None
    over = threading.Event()

    def order() -> None:
        number = torch.zeros(8, device=device)
        while not over.is_set():
            begun_s = time.perf_counter()
            with torch.cuda.stream(stream) if stream else nullcontext():
                number.add_(1)
            if stream:
                stream.synchronize()
            waits_s.append(time.perf_counter() - begun_s)
            time.sleep(0.001)

    thread = threading.Thread(target=order)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def beside(device: str, work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `work` returns, its seconds, and what the other user saw meanwhile."""
    waits_s: list[float] = []
    with another_user(device, waits_s):
        while not waits_s:  # its first order is its start
            time.sleep(0.001)
        waits_s.clear()
        found, seconds = timed(work)
    return found, {
        "seconds": round(seconds, 3),
        "longest_wait_s": round(max(waits_s, default=seconds), 4),
        "orders_per_s": round(len(waits_s) / seconds, 1),
    }


def main() -> None:
    """Fill the card, copy, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mb", type=int, default=4096, help="of all tensors")
    parser.add_argument("--tensor-mb", type=int, default=48)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--out")
    args = parser.parse_args()
    with kept(args.out, args.limit_s) as told:
        told |= {"script": "tests/gpu/host_copies.py", "hardware": hardware()}
        tensors = {
            f"tensor {number}": torch.randn(args.tensor_mb << 18, device=args.device)
            for number in range(args.mb // args.tensor_mb)
        }
        told["gb"] = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
        told["alone"] = beside(args.device, lambda: time.sleep(ALONE_S))[1]
        for name, copy in (("plain", plain), ("pieces", host_copies)):
            for _ in range(2):
                copies, figures = beside(args.device, lambda copy=copy: copy(tensors))
                told[name] = figures
                unequal = [k for k, t in tensors.items() if not torch.equal(t.cpu(), copies[k])]
                assert not unequal, f"{name}: other bits in {unequal}"
                del copies


if __name__ == "__main__":
    main()
