"""Two side streams of a GPU, one that moves bytes and one that sums them; nothing on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch


class SideStreams:
    """Work on them may overlap; whoever reads the result calls `finish` first."""

    def __init__(self, device: torch.device) -> None:
        self._moving = self._summing = None
        if device.type == "cuda":
            self._moving, self._summing = (
                torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
                torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            )
            # What was begun before, reading the old weights or writing the new, comes first.
            self._moving.wait_stream(torch.cuda.current_stream(device))
            self._summing.wait_stream(torch.cuda.current_stream(device))

    def moving(self) -> contextlib.AbstractContextManager[object]:
        """For broadcasts and the copies that feed them."""
        return _on(self._moving)

    def summing(
        self, tensors: Sequence[torch.Tensor] = ()
    ) -> contextlib.AbstractContextManager[object]:
        """For checksums; `tensors` are not given back before they are read."""
        if self._summing is not None:
            for tensor in tensors:
                tensor.record_stream(self._summing)
        return _on(self._summing)

    def finish(self) -> None:
        """Wait for both."""
        for stream in (self._moving, self._summing):
            if stream is not None:
                stream.synchronize()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
