"""A router in front of stand-in servers, which answers as was recorded of the real ones.

    python -m tests.servers.fake_router PYTHON FILE

records them: PYTHON is that of an environment with `vllm-router` and `sglang-router` (no dependency
of ours). Each stands in front of two stand-in servers and is asked `PROBES`; the file says what it
answered and how many of its servers were reached by it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import aiohttp
from aiohttp import web

from rlstreams.streams.broker.ports import free_ports
from tests.servers.fake_server import FakeServer
from tests.servers.recorded import Served

RECORDED = Path(__file__).parents[1] / "contract/recordings/routers.json"
# Of each kind: the stand-in that it is put in front of, and the words that start it.
ROUTERS = {
    "vllm-router": ("vllm-0.32.0", ["-m", "vllm_router.launch_router"]),
    "sglang-router": ("sglang-0.5.23", ["-m", "sglang_router.launch_router"]),
}
PROBES = (
    "GET /health", "GET /workers", "GET /openapi.json", "GET /version", "GET /v1/models",
    "GET /get_server_info", "GET /weight_info", "GET /metrics",
    "POST /resume", "POST /continue_generation",
)  # fmt: skip
START_S = 60.0


class FakeRouter(Served):
    """Answers its own routes as was recorded; what a real one passed on goes to one server."""

    def __init__(self, kind: str, servers: Sequence[FakeServer]) -> None:
        self._probes: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())[kind]["probes"]
        self._urls = [server.url for server in servers]
        self._turns = cycle(self._urls)
        super().__init__()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        known = self._probes.get(f"{request.method} {request.path}")
        # vLLM's passes on what it does not know; SGLang's has 404 for that.
        passes = "GET /openapi.json" if known is None else f"{request.method} {request.path}"
        if self._probes[passes]["reached"]:
            content = await request.read()
            url = next(self._turns) + request.path_qs
            async with (
                aiohttp.ClientSession() as session,
                session.request(request.method, url, data=content, headers=_JSON) as answer,
            ):
                kind = answer.headers.get("Content-Type", "text/plain").partition(";")[0]
                text = (await answer.read()).decode()
                return web.Response(status=answer.status, text=text, content_type=kind)
        found = known or {"status": 404, "kind": "text/plain", "answer": ""}
        text = found["answer"]
        for number, url in enumerate(self._urls):
            text = text.replace(f"<server {number}>", url)
        return web.Response(status=found["status"], text=text, content_type=found["kind"])


_JSON = {"Content-Type": "application/json"}


@contextmanager
def real_router(python: str, kind: str, urls: Sequence[str]) -> Iterator[str]:
    """The url of a real one, once it has found its servers."""
    port, metrics = free_ports(2)
    words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    words += ["--policy", "round_robin", "--worker-urls", *urls]
    process = subprocess.Popen(
        [python, *ROUTERS[kind][1], *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not all(server in asked(url, "GET /workers")["answer"] for server in urls):
            assert process.poll() is None, f"{kind} ended with status {process.returncode}"
            assert time.monotonic() < until_s, f"{kind} has not found {urls} after {START_S:g} s"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def asked(url: str, probe: str) -> dict[str, Any]:
    """What it answers; status 0: nobody listens."""
    method, _, path = probe.partition(" ")
    request = Request(url + path, method=method, data=b"{}" if method == "POST" else None,
                      headers=_JSON)  # fmt: skip
    try:
        with urlopen(request, timeout=START_S) as answer:
            status, headers, content = answer.status, answer.headers, answer.read()
    except HTTPError as err:
        status, headers, content = err.code, err.headers, err.read()
    except OSError:
        return {"status": 0, "kind": "", "answer": ""}
    kind = headers.get("Content-Type", "text/plain").partition(";")[0]
    return {"status": status, "kind": kind, "answer": content.decode()}


def recorded(python: str, kind: str) -> dict[str, Any]:
    """One router."""
    servers = [FakeServer(ROUTERS[kind][0]) for _ in range(2)]
    urls = [server.url for server in servers]
    question = f"import importlib.metadata as m; print(m.version({kind!r}))"
    version = subprocess.run(
        [python, "-c", question], capture_output=True, text=True, check=True
    ).stdout.strip()
    probes = {}
    try:
        with real_router(python, kind, urls) as url:
            for probe in PROBES:
                path = probe.partition(" ")[2]
                before = [server.heard[path] for server in servers]
                found = asked(url, probe)
                after = [server.heard[path] for server in servers]
                found["reached"] = sum(a > b for a, b in zip(after, before, strict=True))
                for number, server in enumerate(urls):
                    found["answer"] = found["answer"].replace(server, f"<server {number}>")
                probes[probe] = found | ({"answer": ""} if found["reached"] else {})
    finally:
        for server in servers:
            server.close()
    return {"version": version, "probes": probes}


if __name__ == "__main__":
    told = {kind: recorded(sys.argv[1], kind) for kind in ROUTERS}
    Path(sys.argv[2]).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
