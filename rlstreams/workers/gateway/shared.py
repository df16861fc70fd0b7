"""Parts that all sessions of one worker share: engine, renderer, and the way into the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import zstandard

from rlstreams.streams.log.bus import Appender
from rlstreams.workers.engines.base import Engine
from rlstreams.workers.gateway.port import CallRefusedError, CallRequest, Renderer
from rlstreams.workers.loop.commit_requests import CommitRequests
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.policy.puller import Loads

BUSY_S = 1.0  # until a request that finds no room may be sent again
OVERLOADED = "overloaded"  # code of that refusal
CALLS_PER_SLOT = 4  # under way, for each that the engine samples at a time


@dataclass(slots=True, kw_only=True)
class SharedParts:
    """Shared parts and names; the number of calls under way, and the loads that can be read."""

    engine: Engine
    renderer: Renderer
    tokenizer: Tokenizer
    commits: CommitRequests
    appender: Appender
    loads: Callable[[], Loads]  # announced or about to be
    read_again: Callable[[str, bytes], CallRequest]  # a recorded request, by its dialect
    worker: str
    instance: str
    max_attempts: int = 3
    num_live: int = 0
    readable: set[str] = field(
        default_factory=set
    )  # ids of loads whose `PolicyLoaded` is committed
    _packer: zstandard.ZstdCompressor = field(
        default_factory=lambda: zstandard.ZstdCompressor(level=1)
    )

    def packed(self, text: bytes) -> bytes:
        """Pack by zstd; one packer for all, since making one costs more than a request does."""
        return self._packer.compress(text)

    @property
    def most_live(self) -> int:
        """Calls that are under way at most."""
        return CALLS_PER_SLOT * self.engine.max_capacity

    @property
    def is_full(self) -> bool:
        """Whether no further call finds room."""
        return self.num_live >= self.most_live

    @contextmanager
    def place(self) -> Iterator[None]:
        """Room for one call that is sampled.

        Raises:
            CallRefusedError: 429; too many are under way.
        """
        if self.is_full:
            raise CallRefusedError(
                429,
                OVERLOADED,
                f"{self.num_live} calls are under way, at most {self.most_live} are taken",
                retry_after_s=BUSY_S,
            )
        self.num_live += 1
        try:
            yield
        finally:
            self.num_live -= 1
