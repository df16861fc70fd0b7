"""The gateway's HTTP: the addresses of the dialects, refusals, and calls that outlive clients.

A call runs as a task of its own: a client that hangs up ends nothing, and its retry is given the
same answer. A stream is made from the committed answer. Its status line is held back for a while,
so that an early refusal keeps its status; then comments say that the client shall wait on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from rlstreams.workers.gateway.http.dialect import Dialect, ParsedRequest, as_json
from rlstreams.workers.gateway.http.dialects import CHAT, MESSAGES, RESPONSES
from rlstreams.workers.gateway.http.hang_ups import unless_hung_up, watch
from rlstreams.workers.gateway.http.messages import dialogue
from rlstreams.workers.gateway.http.wire import IS_TRAINED, Body, bad
from rlstreams.workers.gateway.keys import key_of
from rlstreams.workers.gateway.port import (
    CallAnswer,
    CallRefusedError,
    Calls,
    Desk,
    Report,
    ending,
)

if TYPE_CHECKING:
    from rlstreams.workers.gateway.http.elsewhere import Elsewhere

KEEPALIVE_S = 5.0  # clients and proxies give up a silent stream
MAX_ASK_S = 60.0  # proxies cut an answer that takes longer
MAX_BODY_BYTES = 32 << 20  # a dialogue of a million tokens is 4 MB
MAX_WORD_BYTES = 1 << 20  # of an outcome or a close
MAX_PARTS = 256  # of a reward; each is a figure of its own
_OVERRULED = "x-rlstreams-overruled"
_LOG = logging.getLogger(__name__)
_MODELS = ("", "/{model:path}")
_POSTED: dict[str, Dialect] = {
    "chat/completions": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "messages/count_tokens": MESSAGES,
    "outcome": CHAT,
    "close": CHAT,
    "heartbeat": CHAT,
}
_OUTCOME = frozenset(field.name for field in fields(Report))
T = TypeVar("T")


class Gateway:
    """One method for each address; holds the tasks under way."""

    def __init__(
        self,
        calls: Calls,
        desk: Desk | None = None,
        *,
        elsewhere: Elsewhere | None = None,
        keepalive_s: float = KEEPALIVE_S,
        max_body: int = MAX_BODY_BYTES,
    ) -> None:
        """
        Args:
            desk: gives sessions to those who ask; None: all agents are started here.
            elsewhere: has requests for sessions that went away answered; None: none are.
            keepalive_s: how long a stream is silent.
            max_body: of a request, in bytes.
        """
        self._calls = calls
        self._desk = desk
        self._elsewhere = elsewhere
        self._keepalive_s = keepalive_s
        self._max_body = max_body
        self._tasks: set[asyncio.Task[Any]] = set()

    def app(self) -> ASGIApp:
        """The ASGI application."""
        handlers: dict[str, Any] = {
            "messages/count_tokens": self._count,
            "outcome": self._report,
            "close": self._close,
            "heartbeat": self._beat,
        }
        routes = [Route("/health", self._health)]
        for prefix in ("/v1", "/sessions/{key}/v1"):
            for path, dialect in _POSTED.items():
                handler = handlers.get(path) or partial(self._answer, dialect=dialect)
                routes.append(self._route(f"{prefix}/{path}", dialect, handler, self._calls))
            routes += [Route(f"{prefix}/models{more}", self._models) for more in _MODELS]
        if self._desk is not None:
            routes.append(self._route("/sessions", CHAT, partial(_given, self._desk), self._desk))
        app = Starlette(routes=routes, exception_handlers={HTTPException: _not_there})
        app.router.redirect_slashes = False
        return app

    async def drain(self, deadline_s: float) -> int:
        """Let calls under way end; returns how many did not within `deadline_s` and are cut."""
        until_s = time.monotonic() + deadline_s
        while self._tasks and (left_s := until_s - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=left_s)
        late = list(self._tasks)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return len(late)

    def _route(
        self,
        path: str,
        dialect: Dialect,
        handler: Any,  # noqa: ANN401
        by: Calls | Desk,
    ) -> Route:
        """
        Args:
            by: checks the key, before anything else of the request is read.
        """

        async def guarded(request: Request) -> Response:
            try:
                key = key_of(request.headers, request.path_params.get("key", ""))
                by.check(key)
                if by is self._calls and self._elsewhere is not None:
                    found = await self._elsewhere.answer(request, key, self._body)
                    if found is not None:
                        return found
                answer: Response = await handler(request, key)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                return _refusal(dialect, ending())  # its work was cut, by `drain`
            except Exception as err:  # noqa: BLE001 - each is answered in the dialect's own shape
                return _refusal(dialect, _refused(err))
            return answer

        return Route(path, guarded, methods=["POST"])

    async def _answer(self, request: Request, key: str, *, dialect: Dialect) -> Response:
        asked = dialect.asked(await self._body(request), request.headers)
        calls = [self._started(self._calls.call(key, call)) for call in asked.calls]
        work = self._started(_all(calls))
        watch(request, work, calls)
        if not asked.is_stream:
            answers = await asyncio.shield(work)
            body = as_json(dialect.answer(asked, answers, self._calls.model))
            return Response(body, media_type="application/json", headers=_headers(answers))
        await asyncio.wait([work], timeout=self._keepalive_s)
        if not work.done():
            waiting = self._stream(work, asked, dialect)
            return StreamingResponse(waiting, media_type="text/event-stream", headers=_STREAM)
        answers = work.result()
        stream = b"".join(dialect.events(asked, answers, self._calls.model))
        headers = {**_STREAM, **_headers(answers)}
        return Response(stream, media_type="text/event-stream", headers=headers)

    async def _stream(
        self, work: asyncio.Task[list[CallAnswer]], asked: ParsedRequest, dialect: Dialect
    ) -> AsyncIterator[bytes]:
        """Stream an answer that is not ready yet; the stream reports a failure, too."""
        while not work.done():
            yield dialect.keepalive
            await asyncio.wait([work], timeout=self._keepalive_s)
        if work.cancelled():
            yield dialect.failed(ending())
            return
        try:
            answers = work.result()
        except Exception as err:  # noqa: BLE001 - the status line is gone: the stream says it
            yield dialect.failed(_refused(err))
            return
        for name, value in _headers(answers).items():
            yield f": {name}: {value}\n\n".encode()
        for chunk in dialect.events(asked, answers, self._calls.model):
            yield chunk

    async def _count(self, request: Request, key: str) -> Response:
        """Tokens of a prompt; an agent asks before each turn, and the request is not recorded."""
        messages, tools = dialogue(Body(await self._body(request)))
        count = self._calls.count_tokens(key, messages, tools)
        return Response(as_json({"input_tokens": count}), media_type="application/json")

    async def _report(self, request: Request, key: str) -> Response:
        body = Body(await self._body(request, MAX_WORD_BYTES), takes_nan=True)
        if unknown := sorted(body.values.keys() - _OUTCOME):
            raise bad(
                f"outcome.{unknown[0]}", f"is no field; there are {', '.join(sorted(_OUTCOME))}"
            )
        try:
            report = msgspec.convert(body.values, Report)
        except msgspec.ValidationError as err:
            raise bad("outcome", f"cannot be: {err}") from err
        if len(report.parts) > MAX_PARTS:
            raise bad("parts", f"may have {MAX_PARTS} entries, got {len(report.parts)}")
        values = {"reward": report.reward, **{f"parts.{k}": v for k, v in report.parts.items()}}
        for name, value in values.items():
            if not math.isfinite(value):
                raise bad(name, f"must be finite, got {value}")
        made = await asyncio.shield(self._started(self._calls.report(key, report)))
        return Response(as_json({"outcome_id": made}), media_type="application/json")

    async def _close(self, request: Request, key: str) -> Response:
        body = Body(await self._body(request, MAX_WORD_BYTES))
        kind, detail = body.text("kind", "ended"), body.text("detail")
        await asyncio.shield(self._started(self._calls.close(key, kind, detail)))
        return Response(as_json({"closed": True}), media_type="application/json")

    async def _beat(self, _: Request, key: str) -> Response:
        await self._calls.beat(key)
        return Response(as_json({"open": True}), media_type="application/json")

    async def _models(self, request: Request) -> Response:
        """The one model, under whatever name it is asked for: agents compact by its length."""
        length = self._calls.max_model_len
        model = {"id": self._calls.model, "object": "model", "created": 0,
                 "owned_by": "rlstreams", "max_model_len": length}  # fmt: skip
        is_one = "model" in request.path_params
        body = model if is_one else {"object": "list", "data": [model]}
        return Response(as_json(body), media_type="application/json")

    async def _health(self, _: Request) -> Response:
        return Response(as_json({"status": "ok"}), media_type="application/json")

    async def _body(self, request: Request, most: int | None = None) -> bytes:
        """The body; one whose `content-length` is too long is not read.

        Raises:
            CallRefusedError: 413.
        """
        most = self._max_body if most is None else min(most, self._max_body)
        said = request.headers.get("content-length", "0")
        size = int(said) if said.isdecimal() else 0
        pieces: list[bytes] = []
        if size <= most:
            size = 0
            async for piece in request.stream():
                pieces.append(piece)
                if (size := size + len(piece)) > most:
                    break
        if size > most:
            why = f"the body has {size} bytes or more, the limit is {most}"
            raise CallRefusedError(413, "request_too_large", why)
        return b"".join(pieces)

    def _started(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that no client ends by hanging up."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its client may be gone


async def _given(desk: Desk, request: Request, key: str) -> Response:
    """Give a session to a runner or client, as soon as there is one; 204: there was none in time.

    All parameters are in the query, so a body is ignored. A client that hangs up is given none.
    """
    client_group = request.query_params.get("group", "")
    given = await unless_hung_up(request, desk.ask(key, _wait_s(request), client_group))
    if given is None:
        return Response(status_code=204, headers={"retry-after": "1"})
    return Response(as_json(dict(given)), media_type="application/json")


def _wait_s(request: Request) -> float:
    """
    Raises:
        CallRefusedError: 400; it is no time up to `MAX_ASK_S`.
    """
    text = request.query_params.get("wait_s", "30")
    with suppress(ValueError):
        if 0 <= (wait_s := float(text)) <= MAX_ASK_S:
            return wait_s
    raise bad("wait_s", f"must be seconds from 0 to {MAX_ASK_S:g}, got {text!r:.60}")


_STREAM = {"cache-control": "no-store", "x-accel-buffering": "no"}


async def _all(calls: Sequence[asyncio.Task[CallAnswer]]) -> list[CallAnswer]:
    """All answers; raises the first refusal, and then nobody waits for the others: their client
    hears of none of them."""
    try:
        return await asyncio.gather(*map(asyncio.shield, calls))
    except Exception:
        for call in calls:
            call.cancel()
        raise


def _headers(answers: Sequence[CallAnswer]) -> dict[str, str]:
    first, said = answers[0], {"x-rlstreams-call": answers[0].call_id}
    if first.overruled:
        said[_OVERRULED] = as_json(dict(first.overruled))
    if not first.is_trained:
        said[IS_TRAINED] = "false"
    return said


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _refused(err: Exception) -> CallRefusedError:
    """The refusal for an error; an error of ours is logged, with no word of the request."""
    if isinstance(err, CallRefusedError):
        return err
    _LOG.error("a call failed", exc_info=err)
    return CallRefusedError(500, "internal_error", f"{type(err).__name__}", retry_after_s=1.0)


def _refusal(dialect: Dialect, refused: CallRefusedError) -> Response:
    headers = _retry_headers(refused)
    if refused.status == 413:
        headers["connection"] = "close"
    body = as_json(dialect.error(refused))
    return Response(body, refused.status, headers, media_type="application/json")


def _retry_headers(refused: CallRefusedError) -> dict[str, str]:
    """Whether a client may try again, in a header that both clients obey."""
    if refused.retry_after_s is None:
        return {"x-should-retry": "false"}
    wait_s = max(refused.retry_after_s, 0.0)
    return {"x-should-retry": "true", "retry-after": str(math.ceil(wait_s)),
            "retry-after-ms": str(math.ceil(wait_s * 1000))}  # fmt: skip


def _not_there(request: Request, err: Exception) -> Response:
    assert isinstance(err, HTTPException)
    why = (
        f"{request.method} is nothing that this address answers; there are POST "
        f"{', '.join(f'/v1/{path}' for path in _POSTED)}, and GET /v1/models"
    )
    return _refusal(CHAT, CallRefusedError(err.status_code, "not_found", why))
