"""The plugin in a stand-in server: the real one (`link/orders.py`), over the chain's table.

Its routes are in the server from its start or not at all, as with the real ones. Orders are obeyed
one after the other, as a server's ranks do it.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from typing import TYPE_CHECKING

import torch
from aiohttp import web

from rlstreams.workers.weights.link.orders import ServerRank

if TYPE_CHECKING:
    from tests.servers.markov import MarkovServer


class Table(torch.nn.Module):
    """The chain's only parameter."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table.clone(), requires_grad=False)

    def load_weights(self, pairs: object) -> None:
        """As engines' models have it."""
        for name, tensor in pairs:  # type: ignore[attr-defined]
            self.get_parameter(name).copy_(tensor)


class FakePlugin:
    """Obeys orders for one chain."""

    def __init__(self, core: MarkovServer) -> None:
        self.num_orders = 0
        self._core = core
        self._model = Table(core.table)
        self._server = ServerRank(self._model, torch.device("cpu"), engine="fake")
        self._one_at_a_time = asyncio.Lock()

    async def obey(self, text: str) -> None:
        """The report says how it went."""
        async with self._one_at_a_time:
            self.num_orders += 1
            report = await asyncio.to_thread(self._server.obey, text)
            if "policy_version" in report:
                self._core.table = self._model.table.data.clone()
                self._core.num_loads += 1

    async def vllm(self, request: web.Request) -> web.Response:
        """`POST /update_weights`."""
        await self.obey((await request.json())["update_info"]["order"])
        return web.json_response({"message": "ok"})

    async def sglang(self, request: web.Request) -> web.Response:
        """`POST /update_weights_from_tensor`."""
        (content,) = (await request.json())["serialized_named_tensors"]
        for text, _ in pickle.loads(base64.b64decode(content)):
            await self.obey(text)
        return web.json_response({"success": True, "message": "ok"})

    def routes(self, kind: str) -> list[web.RouteDef]:
        """Of the server's kind."""
        if kind == "sglang":
            tensor = web.post("/update_weights_from_tensor", self.sglang)
            return [tensor, web.post("/end_weight_update", _fine)]
        quiet = ("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update")
        return [*(web.post(path, _fine) for path in quiet), web.post("/update_weights", self.vllm)]


async def _fine(_: web.Request) -> web.Response:
    return web.json_response({"message": "ok"})
