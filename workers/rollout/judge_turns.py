"""A judge on the GPUs of the sampler's servers: one side sleeps while the other works.

No lease is needed: one rollout worker alone asks this judge, and its own servers end with it. The
judge is put to sleep before the first of them starts. It keeps its weights, in host memory, for
nobody gives it others. One that is away has no memory there: who asks it waits, as for any judge.
"""

from __future__ import annotations

import asyncio

from rlstreams.streams.log.errors import ConfigError, StreamsError
from rlstreams.workers.engines.served.http import REFUSED, ServerError, ServerGoneError, ServerHttp

LOOK_S = 5.0
NO_ROUTE = 404  # it was started without them: another try would meet the same


class JudgeTurns:
    """A vLLM that somebody else started. Belongs to the engine's event loop."""

    def __init__(self, url: str, deadline_s: float) -> None:
        """Args: url: as the verifier `judge` has it. deadline_s: of one change."""
        self._http = ServerHttp(url.rstrip("/").removesuffix("/v1"))
        self._deadline_s = deadline_s
        self._may_ask = asyncio.Event()

    async def may_ask(self) -> None:
        """Until it is the judge's turn."""
        await self._may_ask.wait()

    async def begin(self) -> None:
        """Load it; the sampler's servers sleep.

        Raises:
            StreamsError: it did not wake up.
        """
        await self._tell("/wake_up")
        self._may_ask.set()

    async def end(self) -> None:
        """Have it give its memory up.

        Raises:
            StreamsError: its memory may still be taken.
        """
        self._may_ask.clear()
        await self._tell("/sleep?level=1")

    async def close(self) -> None:
        """Close connections; the judge stays as it is."""
        await self._http.close()

    async def _tell(self, route: str) -> None:
        try:
            await self._http.post(route, None, self._deadline_s)
        except ServerError as err:
            is_silent = isinstance(err, ServerGoneError)
            if is_silent and await self._http.status_of("/health", LOOK_S) == REFUSED:
                return
            await self.close()  # its worker ends
            kind = ConfigError if err.status == NO_ROUTE else StreamsError
            raise kind(
                f"reward.by_turns is true, but the judge does not change turns: {err}; start it "
                "with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"
            ) from err
