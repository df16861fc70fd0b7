"""What rank 0 and a follower say to each other: JSON and arrays over a socket of their own.

The socket is a pair that the follower inherits, so nobody else can reach it, and nothing that
arrives is executed or unpickled. A frame is two lengths (4 bytes each, big-endian: of the JSON, of
all arrays), the JSON `{"head": ..., "arrays": [[name, dtype, shape], ...]}`, and the arrays' bytes.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstreams.workers.trainer.learn.packing import MicroBatch
from rlstreams.workers.trainer.parallel.deal import Task

Head = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]

_LENGTHS = struct.Struct(">IQ")
_PLAIN = ("num_batch_loss_tokens", "num_batch_rows", "num_batch_samples", "bin_tokens")
_ARRAYS = tuple(
    field.name for field in fields(MicroBatch) if field.name not in (*_PLAIN, "trajectories")
)


class Link:
    """One end. Any thread sends; one thread receives."""

    def __init__(self, end: socket.socket, send_limit_s: float) -> None:
        self._end = end
        self._sending = threading.Lock()
        # Whoever is stopped reads nothing: sending ends then too.
        limit = struct.pack("ll", int(send_limit_s) + 1, 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """
        Raises:
            OSError: the other end is gone, or takes nothing (BlockingIOError).
        """
        rows = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
        text = json.dumps({"head": head, "arrays": rows}).encode()
        payload = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
        with self._sending:
            self._end.sendall(_LENGTHS.pack(len(text), len(payload)) + text + payload)

    def receive(self) -> tuple[Head, Arrays] | None:
        """The next message; None: the other end is gone."""
        lengths = self._exactly(_LENGTHS.size)
        if lengths is None:
            return None
        num_text, num_payload = _LENGTHS.unpack(lengths)
        text, payload = self._exactly(num_text), self._exactly(num_payload)
        if text is None or payload is None:
            return None
        told = json.loads(bytes(text))
        arrays, start = {}, 0
        for name, dtype, shape in told["arrays"]:
            count = int(np.prod(shape))
            array = np.frombuffer(payload, dtype, count, start).reshape(shape)
            arrays[name], start = array, start + array.nbytes
        return told["head"], arrays

    def close(self) -> None:
        """The other end sees it at once, a thread of ours that receives too."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            self._end.close()

    def _exactly(self, number: int) -> bytearray | None:
        found = bytearray(number)
        view, start = memoryview(found), 0
        while start < number:
            try:
                count = self._end.recv_into(view[start:])
            except OSError:
                return None
            if not count:
                return None
            start += count
        return found


def tasks_out(tasks: list[Task]) -> tuple[list[Head], Arrays]:
    """A rank's tasks as JSON and arrays. Trajectories stay: only their arrays are computed with."""
    heads: list[Head] = []
    arrays: Arrays = {}
    for number, task in enumerate(tasks):
        head: Head = {"index": task.index, "batch": None}
        if task.micro_batch is not None:
            head["batch"] = {name: getattr(task.micro_batch, name) for name in _PLAIN}
            given = {name: getattr(task.micro_batch, name) for name in _ARRAYS}
            arrays |= {f"{number}.{name}": a for name, a in given.items() if a is not None}
        heads.append(head)
    return heads, arrays


def tasks_in(heads: list[Head], arrays: Arrays) -> list[Task]:
    """What `tasks_out` gave."""
    tasks = []
    for number, head in enumerate(heads):
        micro_batch = None
        if head["batch"] is not None:
            own: Head = {name: arrays.get(f"{number}.{name}") for name in _ARRAYS}
            micro_batch = MicroBatch(trajectories=(), **own, **head["batch"])
        tasks.append(Task(index=head["index"], micro_batch=micro_batch))
    return tasks


def plain(section: Any) -> Head:  # noqa: ANN401  (any dataclass of the configuration)
    """A section as JSON has it."""
    return asdict(section)
