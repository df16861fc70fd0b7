"""The adapter of servers, as tests use it: deadlines for dead servers only, the chain as model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.delivery import FolderDelivery
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.engines.served.plugin_delivery import PluginDelivery
from rlstreams.workers.engines.served.server_client import ServerClient
from rlstreams.workers.engines.served.settings import ServedSettings
from rlstreams.workers.engines.served.shape import longest_sequence, read_shape
from rlstreams.workers.weights.report_listener import ReportListener
from tests.servers.fake_server import FakeServer
from tests.servers.markov import CONFIG


def model_folder(folder: Path) -> Path:
    """A folder whose `config.json` describes the chain."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    return model


STAND_IN_BEAT_S = 0.02


def settings(kind: str, **changes: Any) -> ServedSettings:
    base = ServedSettings(
        kind=Kind(kind),
        limit=8,
        capture_experts=True,
        on_pull=PauseMode.KEEP,
        keep_cache=True,
        pull_s=60.0,
        request_s=60.0,
        answer_s=30.0,
        again_s=30.0,  # whoever runs hears an abort
        start_s=60.0,
        beat_s=0.5,
        look_s=30.0,  # only who is dead is silent for so long
        silent_s=30.0,
        allow_untested=True,
    )
    return replace(base, **changes)


def served_engine(fakes: Sequence[FakeServer], folder: Path, **changes: Any) -> ServedEngine:
    """An engine of stand-in servers, which are looked at all the time."""
    changes = {"beat_s": STAND_IN_BEAT_S, **changes}
    return engine_of_urls(fakes[0].kind, [fake.url for fake in fakes], folder, **changes)


def plugin_engine(
    fake: FakeServer, listener: ReportListener, folder: Path, *, probe_s: float, **changes: Any
) -> ServedEngine:
    """An engine of one stand-in server that weights reach by its plugin, if it has one.

    Args:
        probe_s: longest answer to a probe.
    """
    model = model_folder(folder)
    chosen = settings(fake.kind, **changes)
    shape = read_shape(model)
    delivery = PluginDelivery(listener, model, folder / "versions", "0", probe_s=probe_s)
    server = ServerClient(fake.url, chosen, shape, delivery)
    return ServedEngine(chosen, shape, longest_sequence(model), [server])


def engine_of_urls(kind: str, urls: Sequence[str], folder: Path, **changes: Any) -> ServedEngine:
    """An engine of servers of the chain, wherever they are."""
    model = model_folder(folder)
    chosen = settings(kind, **changes)
    shape = read_shape(model)
    servers = [
        ServerClient(url, chosen, shape, FolderDelivery(model, folder / f"versions-{number}"))
        for number, url in enumerate(urls)
    ]
    return ServedEngine(chosen, shape, longest_sequence(model), servers)


def up(engine: ServedEngine) -> list[str]:
    """Urls of the servers that answer."""
    return [server.url for server in engine._servers if server.is_up]


def holding(engine: ServedEngine, policy_version: int) -> list[str]:
    """Urls of the open servers that hold a version, and whose pull of it has ended."""
    return [
        server.url
        for server in engine._servers
        if server.state.is_open
        and server not in engine._pulls
        and server.held is not None
        and server.held.policy_version == policy_version
    ]
