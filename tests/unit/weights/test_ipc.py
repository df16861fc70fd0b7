"""Bytes between two processes of one card: the window, its signals, and what does without them.

Without a GPU: both ends are threads, and the window is memory that they share.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from rlstreams.workers.weights.link import ipc
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.ipc import IpcGroup

CPU = torch.device("cpu")


def form(group: IpcGroup, store: HashStore, rank: int) -> None:
    until_s = time.monotonic() + 20.0
    group.form(store, rank, 2, host="127.0.0.1", until_s=until_s, look=lambda: None)


def settle(crossing: ipc.Crossing) -> None:
    until_s = time.monotonic() + 20.0
    while not crossing.done():
        assert time.monotonic() < until_s
        time.sleep(0.0002)


def make_store() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


def test_pieces_cross_in_windows_that_are_smaller_than_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each piece arrives whole, in order, through one window that both ends take turns with."""
    monkeypatch.setattr(ipc, "WINDOW_BYTES", 1000)
    monkeypatch.setattr(ipc, "_windows", {})
    monkeypatch.setattr(ipc, "exported", lambda _: "here")
    monkeypatch.setattr(ipc, "opened", lambda _, device: ipc.window_of(device))
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, 999, 3), (2500,), (0, 1000, 7))
    sent = [
        [torch.randint(256, (n,), generator=generator).to(torch.uint8) for n in s] for s in sizes
    ]
    came = [[torch.zeros_like(piece) for piece in batch] for batch in sent]
    store, ends = make_store(), [IpcGroup(CPU, stall_s=20.0), IpcGroup(CPU, stall_s=20.0)]

    def end(rank: int, batches: list[list[torch.Tensor]]) -> None:
        form(ends[rank], store, rank)
        crossings = [ends[rank].broadcast(batch) for batch in batches]  # ahead, as receivers do
        for crossing in crossings:
            settle(crossing)

    receiver = threading.Thread(target=end, args=(1, came))
    receiver.start()
    end(0, sent)
    receiver.join(20.0)
    assert not receiver.is_alive()
    for batch, copy in zip(sent, came, strict=True):
        assert [piece.tolist() for piece in batch] == [piece.tolist() for piece in copy]
    for group in ends:
        group.abort()


def test_a_card_without_ipc_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver that cannot open the window says so: the sender's next try goes another way."""
    store = make_store()
    store.set("window", "from another container")

    def opened(*_: object) -> torch.Tensor:
        raise RuntimeError("invalid device context")

    monkeypatch.setattr(ipc, "opened", opened)
    with pytest.raises(PullError, match="CUDA IPC cannot be had: invalid device context"):
        form(IpcGroup(CPU, stall_s=1.0), store, 1)
