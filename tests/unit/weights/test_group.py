"""What a group of gloo does with tensors that lie on a device."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.group import TransferGroup, name_of

WAIT_S = 60.0
# Nothing here asks the device for anything: its name alone makes a group stage.
NAMED = torch.device("cuda", 0)


def formed(devices: list[torch.device]) -> list[TransferGroup]:
    """A group of one process, rank by rank."""
    store = HashStore()
    groups = [TransferGroup("gloo", device, stall_s=WAIT_S) for device in devices]

    def form(rank: int) -> None:
        until_s = time.monotonic() + WAIT_S
        size = len(groups)
        groups[rank].form(store, rank, size, host="127.0.0.1", until_s=until_s, look=lambda: None)

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return groups


def test_what_is_for_a_device_goes_through_host_memory() -> None:
    """From a sender with a device and one without, and into the target only when all has come."""
    sent = torch.arange(9, dtype=torch.uint8)
    for sender in (NAMED, torch.device("cpu")):
        groups = formed([sender, NAMED, torch.device("cpu")])
        staged, plain = torch.zeros_like(sent), torch.zeros_like(sent)
        works = [
            group.broadcast([tensor])
            for group, tensor in zip(groups, (sent, staged, plain), strict=True)
        ]
        waiting = [works[0], works[2], works[1]]
        until_s = time.monotonic() + WAIT_S
        while not all(work.done() for work in waiting[:2]):
            assert time.monotonic() < until_s
        assert torch.equal(torch.zeros_like(sent), staged)  # nobody looked yet
        while not works[1].done():
            assert time.monotonic() < until_s
        assert torch.equal(sent, staged)
        assert torch.equal(sent, plain)
        for group in groups:
            group.abort()


class Failing(TransferGroup):
    """Whatever makes it meets the error."""

    error: Exception = OSError("no such address")

    def _make(self, store: object, rank: int, size: int, host: str, deadline_s: float) -> None:
        raise self.error


@pytest.mark.parametrize("error", [OSError("no"), socket.gaierror(-9, "no"), ValueError("no")])
def test_a_group_that_cannot_be_made_is_said_to_have_failed(error: Exception) -> None:
    """Or the first broadcast would be the first to notice."""
    group = Failing("nccl", torch.device("cpu"), stall_s=WAIT_S)
    group.error = error
    until_s = time.monotonic() + WAIT_S
    with pytest.raises(PullError, match="the group did not form"):
        group.form(HashStore(), 0, 2, host="::1", until_s=until_s, look=lambda: None)


def test_an_interface_is_found_by_an_ipv4_address_alone() -> None:
    """Its name is what NCCL is told."""
    assert "lo" == name_of("127.0.0.1")
    with pytest.raises(ValueError, match="::1 is no IPv4 address"):
        name_of("::1")
