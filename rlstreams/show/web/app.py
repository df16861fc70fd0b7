"""The live page's process: answers HTTP requests about the runs that it reads, streams news.

Consumes: all topics of each run, by `open_run`. Produces: nothing. Waits for: records, requests.
Unblocked by: the roles, browsers; SIGINT and SIGTERM end it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlstreams.show.report.charts import series, timeline
from rlstreams.show.report.html import STATIC, as_json, plotter, render
from rlstreams.show.report.page import steps_csv
from rlstreams.show.web import views
from rlstreams.show.web.reading import RunReader
from rlstreams.show.web.views import NotThereError
from rlstreams.streams.log.errors import StreamsError

LOOK_S = 0.2  # between two looks whether something is new
ALIVE_S = 15.0
# Nothing but our own files; styles also as empty elements, which the plotter fills by rules.
POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "style-src 'self' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Page = Callable[[RunReader, Mapping[str, str], Sequence[str]], str]


class HostGuard:
    """Middleware: refuses host names that are not this machine's (DNS rebinding), adds headers.

    A numeric address is no name, so it cannot be rebound.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        named = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if self._is_ours(named):
            await self._app(scope, receive, with_headers)
        else:
            message = f"{named!r} is no name of this machine: open this page by its address\n"
            await PlainTextResponse(message, 421)(scope, receive, with_headers)

    def _is_ours(self, named: str) -> bool:
        host = named.rpartition(":")[0] if named.rpartition(":")[2].isdigit() else named
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return host.lower() in self._names
        return True


def application(
    readers: Mapping[str, RunReader], host: str, is_over: Callable[[], bool]
) -> ASGIApp:
    """The app; it closes no reader.

    Args:
        host: a name that browsers may call it by.
        is_over: ends the streams of news.
    """
    give = _Answers(readers, is_over)
    pages: dict[str, Page] = {
        "": views.run, "samples": views.samples, "steps": views.steps, "letters": views.letters,
        "flow": views.flow, "configuration": views.configuration,
    }  # fmt: skip
    of_run = [
        *(Route(f"/{view}", partial(give.page, make=make)) for view, make in pages.items()),
        Route("/samples/go", give.named_sample),
        Route("/samples/{group}", give.group),
        Route("/samples/{group}/{sample}", give.sample),
        Route("/steps/{step:int}", give.step),
        Route("/steps.csv", give.table),
        Route("/series.json", give.numbers),
    ]
    app = Starlette(
        routes=[
            Route("/", give.home),
            Route("/compare", give.compare),
            Route("/events", give.events),
            Route("/static/plotly.js", give.library),
            Mount("/static", StaticFiles(directory=STATIC)),
            Mount("/r/{run}", routes=of_run),
        ],
        exception_handlers=dict.fromkeys(
            (NotThereError, StreamsError, ValueError, HTTPException), give.failed
        ),
    )
    return HostGuard(app, host)


class _Answers:
    """One method for each address; the plain ones run on threads of their own."""

    def __init__(self, readers: Mapping[str, RunReader], is_over: Callable[[], bool]) -> None:
        self._readers = readers
        self._is_over = is_over
        self._names = list(readers)
        self._script = plotter()

    def _of(self, request: Request) -> RunReader:
        name = request.path_params["run"]
        if name not in self._readers:
            there = ", ".join(self._names)
            raise NotThereError(f"there is no run {name} here; there are {there}")
        return self._readers[name]

    def home(self, _: Request) -> Response:
        one = f"/r/{quote(self._names[0])}/"
        return RedirectResponse("/compare" if len(self._names) > 1 else one, 307)

    def page(self, request: Request, make: Page) -> Response:
        return HTMLResponse(make(self._of(request), request.query_params, self._names))

    def sample(self, request: Request) -> Response:
        asked, reader = request.path_params, self._of(request)
        name = f"{asked['group']}/{asked['sample']}"
        return HTMLResponse(views.sample(reader, request.query_params, self._names, name))

    def group(self, request: Request) -> Response:
        reader, name = self._of(request), request.path_params["group"]
        return HTMLResponse(views.group(reader, request.query_params, self._names, name))

    def named_sample(self, request: Request) -> Response:
        name = quote(request.query_params.get("name", ""))
        return RedirectResponse(f"/r/{quote(self._of(request).name)}/samples/{name}", 303)

    def step(self, request: Request) -> Response:
        reader, number = self._of(request), request.path_params["step"]
        return HTMLResponse(views.step(reader, request.query_params, self._names, number))

    def table(self, request: Request) -> Response:
        text = steps_csv(self._of(request).fold.state.run.steps)
        return PlainTextResponse(text, media_type="text/csv")

    def numbers(self, request: Request) -> Response:
        reader, after = self._of(request), int(request.query_params.get("after", 0))
        kills, restarts = views.kills_of(reader), reader.fold.state.throughput.restarts
        lives = timeline(reader.fold, kills, restarts)
        made = as_json({**series(reader.fold, kills, after), "timeline": lives})
        return Response(made, media_type="application/json")

    def compare(self, request: Request) -> Response:
        chosen = request.query_params.getlist("run") or self._names
        readers = [self._readers[name] for name in chosen if name in self._readers]
        return HTMLResponse(views.compare(readers, self._names))

    async def events(self, _: Request) -> Response:
        headers = {"Cache-Control": "no-store"}
        news = _news(self._readers, self._is_over)
        return StreamingResponse(news, media_type="text/event-stream", headers=headers)

    def library(self, _: Request) -> Response:
        headers = {"Cache-Control": "max-age=86400"}
        return Response(self._script, media_type="text/javascript", headers=headers)

    def failed(self, request: Request, err: Exception) -> Response:
        status, message = {NotThereError: 404, ValueError: 400}.get(type(err), 503), str(err)
        if isinstance(err, HTTPException):
            status, message = err.status_code, f"{err.detail}: {request.url.path}"
        page = render("message.html", title="Not shown", message=message, all_runs=self._names)
        return HTMLResponse(page, status)


async def _news(
    readers: Mapping[str, RunReader], is_over: Callable[[], bool]
) -> AsyncIterator[str]:
    """A line whenever something was read, at most five a second."""
    before, silent_s = None, 0.0
    while not is_over():
        now = [reader.news for reader in readers.values()]
        if now != before:
            before, silent_s = now, 0.0
            yield "data: new\n\n"
        elif silent_s >= ALIVE_S:
            silent_s = 0.0
            yield ": alive\n\n"
        await asyncio.sleep(LOOK_S)
        silent_s += LOOK_S


def server_of(readers: Mapping[str, RunReader], host: str = "127.0.0.1") -> uvicorn.Server:
    """Make the server, which runs until SIGINT, SIGTERM, or its `should_exit`."""
    app = application(readers, host, lambda: server.should_exit)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=5,
        )
    )
    return server
