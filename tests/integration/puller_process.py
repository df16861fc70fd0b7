"""A puller in a process of its own, for the tests that kill one in the middle of a transfer.

It says `ready`, pulls once when it is told to, and says what came. With a signal it sends that to
itself when half of the batches are in.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

import torch

from rlstreams.workers.weights.layout import weight_hash
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.pieces import Piece
from rlstreams.workers.weights.link.receiver import Address, Receiver
from rlstreams.workers.weights.link.target import FreshTensors, Row

NUM_TENSORS, NUM_ELEMENTS = 32, 2**20  # 4 MiB each: no socket's buffer holds what is not taken
DEADLINE_S = 600.0  # beyond that of the tests
ROWS: list[Row] = [(f"t{i:02}", "float32", (NUM_ELEMENTS,)) for i in range(NUM_TENSORS)]


class Mortal(FreshTensors):
    """Its owner gets a signal in the middle."""

    def __init__(self, number: int) -> None:
        super().__init__(ROWS, torch.device("cpu"))
        self._number = number
        self._count = 0

    def buffer(self, piece: Piece) -> torch.Tensor:
        """The check asks for each piece once, then the transfer does."""
        self._count += 1
        if self._number and self._count == NUM_TENSORS + NUM_TENSORS // 2:
            os.kill(os.getpid(), self._number)
        return super().buffer(piece)


def pull(tests: Connection, address: str, receiver: str, key: str, epoch: int, number: int) -> None:
    """Runs in the process.

    Args:
        tests: to the one who asks.
        number: of the signal; 0: none.
    """
    torch.set_num_threads(1)
    target = Mortal(number)
    link = Receiver(
        Address(address=address, backend="gloo", receiver=receiver, key=key, epoch=epoch),
        torch.device("cpu"),
        engine="test",
    )
    tests.send("ready")
    tests.recv()
    started_s = time.monotonic()
    try:
        link.receive(0, target, started_s + DEADLINE_S)
        said = {"hash": weight_hash(target.tensors)}
    except PullError as err:
        said = {"kind": err.kind, "error": str(err)}
    tests.send(said | {"seconds": time.monotonic() - started_s})
    link.close()
