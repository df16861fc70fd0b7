"""A client that hangs up while its request is being answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from rlstreams.workers.gateway.port import CallAnswer


def watch(
    request: Request, work: asyncio.Task[Any], calls: Sequence[asyncio.Task[CallAnswer]]
) -> None:
    """Cancel the waits for these calls once their client hung up; the calls go on."""
    gone = asyncio.ensure_future(hung_up(request))

    def cancel(_: object) -> None:
        for call in () if gone.cancelled() else calls:
            call.cancel()

    gone.add_done_callback(cancel)
    work.add_done_callback(lambda _: gone.cancel())


async def hung_up(request: Request) -> None:
    """Return once the client of a request, whose body was read, is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
