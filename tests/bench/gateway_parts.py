"""The two servers of `gateway.py`."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlstreams.workers.gateway.canonical import Matcher, call_id
from rlstreams.workers.gateway.http.serve import GatewayServer, start
from rlstreams.workers.gateway.keys import Keys
from rlstreams.workers.gateway.port import CallAnswer, CallRequest, Parsed
from tests.fake_calls import FakeCalls


class AtOnce(FakeCalls):
    """Answers at once, and keeps nothing."""

    def __init__(self, keys: Keys, num_tokens: int) -> None:
        super().__init__(keys)
        self._read = keys
        self._tokens = ("word ",) * num_tokens

    async def call(self, key: str, request: CallRequest) -> CallAnswer:
        """See Calls."""
        session = self._read.read(key).session_id
        return CallAnswer(
            call_id=call_id(session, Matcher().request_hash(request), 0),
            created_s=0,
            parsed=Parsed(content="".join(self._tokens)),
            finish_reason="stop",
            prompt_tokens=1,
            tokens=self._tokens,
            logprobs=(-1.0,) * len(self._tokens),
        )


async def gateway_server(num_tokens: int) -> tuple[GatewayServer, str]:
    """The gateway, and a key."""
    keys = Keys("secret")
    return await start(AtOnce(keys, num_tokens)), keys.make("7/3", 0, 2**33)


async def bare_server(num_tokens: int) -> tuple[uvicorn.Server, str]:
    """Reads a body, and answers with some bytes."""
    text = "word " * num_tokens

    async def answer(request: Request) -> Response:
        await request.body()
        return Response(text, media_type="application/json")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, http="h11")
    server = uvicorn.Server(config)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    server.lifespan_task = serving  # type: ignore[attr-defined] # the loop itself would let go of it
    return server, f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
