"""A real server for a session: vLLM for the CPU with the demo's model, or one that is named.

`RLSTREAMS_VLLM_URL` names one that runs already; else `.venv-vllm` is made where it is missing, and
a server is started with the command that a rollout worker would use.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from rlstreams.streams.broker.ports import free_ports
from rlstreams.workers.bootstrap.model_server import command_of, where_installed
from rlstreams.workers.config.load import load
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.engines.served.http import ServerHttp
from rlstreams.workers.engines.served.plugin_delivery import PluginDelivery
from rlstreams.workers.engines.served.server_client import ServerClient
from rlstreams.workers.engines.served.shape import longest_sequence, read_shape
from rlstreams.workers.server.process import ServerProcess
from rlstreams.workers.weights import server_plugin
from rlstreams.workers.weights.report_listener import ReportListener
from tests.servers.served import settings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "infra" / "examples" / "demo-vllm.toml"
DEMO = ROOT / "infra" / "examples" / "demo.toml"
DEMO_MODEL = ROOT / "infra" / "examples" / "demo" / "model"
START_S = 900.0
_CALL_S = 60.0
LONG_MODEL_TOKENS = 8192


@contextmanager
def vllm_server(
    folder: Path, plugin: Mapping[str, str] | None = None, **args: Any
) -> Iterator[str]:
    """The url of a server that is ready; it ends with the block if it is ours.

    Args:
        plugin: environment that brings its plugins in; None: ours alone, also of a named server.
        args: of the command, beside those of the example.
    """
    if plugin is None and (named := os.environ.get("RLSTREAMS_VLLM_URL")):
        yield named
        return
    subprocess.run(["sh", str(ROOT / "infra" / "setup-vllm.sh")], check=True)
    changes = [
        f"run.dir={folder}",
        f"model.path={without_end(long_model(folder / 'served'))}",
        f"engine.args.max-num-batched-tokens={LONG_MODEL_TOKENS}",  # a whole prompt in one step
        *(f"engine.args.{name}={value}" for name, value in args.items()),
    ]
    config = load([DEMO, EXAMPLE], changes)
    (port,) = free_ports(1, config.engine.host)
    url = f"http://{config.engine.host}:{port}"
    where = where_installed(config, Kind.VLLM)
    command = command_of(
        config, Kind.VLLM, where, url, plugin or server_plugin.environment(folder / "plugin")
    )
    process = ServerProcess(command, folder / "vllm.log")
    process.start()
    try:
        asyncio.run(ready(url, process))
        yield url
    finally:
        process.end()


def long_model(folder: Path) -> Path:
    """The demo's model for longer sequences: an answer can take as long as a test wants."""
    model = folder / "model"
    if not model.exists():
        model.mkdir(parents=True)
        for file in DEMO_MODEL.iterdir():
            shutil.copy(file, model)
        config = json.loads((model / "config.json").read_text())
        config["max_position_embeddings"] = LONG_MODEL_TOKENS
        (model / "config.json").write_text(json.dumps(config))
    return model


def without_end(model: Path) -> Path:
    """The same, but an answer ends only at the tokens that a request names."""
    for name in ("config.json", "generation_config.json"):
        config = json.loads((model / name).read_text())
        config.pop("eos_token_id", None)
        (model / name).write_text(json.dumps(config))
    return model


async def ready(url: str, process: ServerProcess) -> None:
    http = ServerHttp(url)
    until_s = time.monotonic() + START_S
    try:
        while await http.status_of("/health", 5.0) != 200:
            child = process.child
            assert child is not None
            lines = "\n".join(child.log_tail())
            assert child.poll() is None, f"vLLM ended: {lines}"
            assert time.monotonic() < until_s, f"vLLM is not ready after {START_S:g} s: {lines}"
            await asyncio.sleep(0.5)
        # The first request compiles. Its answer is nonsense: the weights are random.
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
        await http.post("/inference/v1/generate", body, START_S)
    finally:
        await http.close()


def real_engine(
    kind: str, url: str, model: Path, folder: Path, *, stops: bool = True, **changes: Any
) -> ServedEngine:
    """An engine of one running server.

    Args:
        stops: False: no token ends an answer.
    """
    slow = {
        "request_s": 240.0,
        "pull_s": 120.0,
        "start_s": 120.0,
        "silent_s": 60.0,
    }
    chosen = settings(kind, capture_experts=False, **{**slow, **changes})
    shape = read_shape(model)
    if not stops:
        shape = replace(shape, eos_ids=frozenset())
    listener = ReportListener()
    server = ServerClient(
        url, chosen, shape, PluginDelivery(listener, model, folder / "versions-0", "0")
    )
    return ServedEngine(chosen, shape, longest_sequence(model), [server], on_close=listener.close)


def freeze(url: str) -> None:
    """End what the server was asked; what it is asked from now on waits."""
    _call(url, "/pause?mode=keep&clear_cache=false")
    _call(url, "/abort_requests", b"{}")


def thaw(url: str) -> None:
    """Have it go on."""
    _call(url, "/resume")


def step(url: str) -> None:
    """Have a frozen server sample a little: both orders in one packet, so that it stands still
    again however late its client comes to run."""
    place = urlsplit(url)
    order = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: {}\r\n\r\n"
    orders = order.format("/resume", "keep-alive")
    orders += order.format("/pause?mode=keep&clear_cache=false", "close")
    with socket.create_connection((place.hostname, place.port), _CALL_S) as connection:
        connection.sendall(orders.encode())
        while connection.recv(4096):
            pass


def _call(url: str, path: str, body: bytes = b"") -> None:
    with urlopen(Request(url + path, data=body, method="POST"), timeout=_CALL_S) as answer:
        answer.read()


def num_generated(url: str) -> float:
    """Tokens that the server sampled since it was started, by its own count."""
    with urlopen(f"{url}/metrics", timeout=_CALL_S) as answer:
        rows = [line.split() for line in answer.read().decode().splitlines()]
    return sum(float(row[1]) for row in rows if row and "generation_tokens_total" in row[0])
