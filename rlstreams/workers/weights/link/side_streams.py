"""Two side streams of a GPU, one that moves bytes and one that sums them; nothing on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch


class SideStreams:
    """Work on the two streams may overlap; call `finish` before the result is read."""

    def __init__(self, device: torch.device) -> None:
        self._moving = self._summing = None
        if device.type == "cuda":
            self._moving, self._summing = (
                torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
                torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            )
            # Work begun before, which reads the old weights or writes the new ones, comes first.
            self._moving.wait_stream(torch.cuda.current_stream(device))
            self._summing.wait_stream(torch.cuda.current_stream(device))

    def moving(self) -> contextlib.AbstractContextManager[object]:
        """Context for broadcasts and the copies that feed them."""
        return _on(self._moving)

    def summing(
        self, tensors: Sequence[torch.Tensor] = ()
    ) -> contextlib.AbstractContextManager[object]:
        """Context for checksums; the memory of `tensors` is not reused before they are read."""
        if self._summing is not None:
            for tensor in tensors:
                tensor.record_stream(self._summing)
        return _on(self._summing)

    def finish(self) -> None:
        """Wait for both streams."""
        for stream in (self._moving, self._summing):
            if stream is not None:
                stream.synchronize()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
