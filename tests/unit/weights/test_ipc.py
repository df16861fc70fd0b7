"""Bytes between two processes of one card: the window, its signals, and what does without them.

Without a GPU: both ends are threads, and the window is memory that they share.
"""

from __future__ import annotations

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


def make_store() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


def test_a_card_without_ipc_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver that cannot open the window says so: the sender's next try goes another way."""
    store = make_store()
    store.set("window", "from another container")

    def opened(*_: object) -> torch.Tensor:
        raise RuntimeError("invalid device context")

    monkeypatch.setattr(ipc, "opened", opened)
    with pytest.raises(PullError, match="CUDA IPC cannot be had: invalid device context"):
        form(IpcGroup(CPU, stall_s=1.0), store, 1)
