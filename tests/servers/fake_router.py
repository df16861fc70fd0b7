"""A router of data: passes any request on to the next of its servers, control routes too."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import aiohttp
from aiohttp import web

from tests.servers.recorded import Served


class FakeRouter(Served):
    """Takes servers in turn, as a router does that knows nothing of versions."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.asked: list[str] = []  # paths
        self._next = itertools.cycle(urls)
        super().__init__()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        content = await request.read()
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    request.method, next(self._next) + request.path_qs, data=content,
                    headers={"Content-Type": "application/json"},
                ) as answer,
            ):  # fmt: skip
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type="application/json"
                )
        except aiohttp.ClientError as err:
            return web.Response(status=503, text=f"no server: {err}")
