"""A client that hangs up while its request is being answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from rlstreams.workers.gateway.port import CallAnswer

T = TypeVar("T")


def watch(
    request: Request, work: asyncio.Task[Any], calls: Sequence[asyncio.Task[CallAnswer]]
) -> None:
    """Cancel the waits for these calls once their client hung up; the calls go on."""
    gone = asyncio.ensure_future(_hung_up(request))

    def cancel(_: object) -> None:
        for call in () if gone.cancelled() else calls:
            call.cancel()

    gone.add_done_callback(cancel)
    work.add_done_callback(lambda _: gone.cancel())


async def unless_hung_up(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled once the client of the request hung up.

    Raises:
        ClientDisconnect: it did before.
    """
    asking = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise ClientDisconnect
        return asking.result()
    finally:
        asking.cancel()
        gone.cancel()


async def _hung_up(request: Request) -> None:
    """Return once the client of a request, whose body was read, is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
