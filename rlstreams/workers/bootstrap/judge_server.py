"""From a configuration to the server of the run's judge: a fixed model that nobody trains.

It is one more server of the run, behind those that it samples from: the same role starts it, looks
at it and ends with it. Without torch, as that role.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from rlstreams.streams.broker.ports import free_port
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.config.checks import check_address
from rlstreams.workers.config.engine import VISIBLE
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.served.adapters import ADAPTERS
from rlstreams.workers.engines.served.command import (
    StartCommand,
    installed_server,
    judge_command,
)
from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.lease import lock_file
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.server.judge import JudgeInShifts
from rlstreams.workers.server.process import HealthLooks, MemoryLock, ServerProcess, start_locks
from rlstreams.workers.server.worker import Patience, ServerWorker

LOOPBACK = "127.0.0.1"


def is_judge(context: Context) -> bool:
    """Whether this server is the judge's: the one behind those that the run samples from."""
    config, is_server = context.config, context.role == "server"
    if not is_server or not config.judge.model or context.is_joined:
        return False
    return context.ordinal == config.num_started


def command_of_judge(config: RunConfig, port: int = 0) -> tuple[StartCommand, str]:
    """The command that starts the judge's server, and the server's version.

    Args:
        port: on loopback, behind the gate of a judge that shares its device; 0: `judge.port`.

    Raises:
        ConfigError: no such Python or model, an argument that contradicts one of ours.
    """
    judge, device = config.judge, config.shared_device("judge")
    kind, python = Kind(judge.engine), judge.python or config.engine.python or sys.executable
    try:
        found = installed_server(kind, python)
        command = judge_command(
            kind,
            python,
            model=str(model_folder(judge.model)),
            name=judge.model,
            address=(LOOPBACK, port) if port else (judge.host, judge.port),
            log_level=config.engine.log_level,
            sleeps=device is not None,
            args=judge.args,
        )
    except EngineError as err:
        raise ConfigError(f"the server of [judge]: {err}") from err
    environment = {
        name: resolve_secret(str(int(v) if isinstance(v, bool) else v), f"judge.env.{name}")
        for name, v in judge.env.items()
    }
    gpus = {} if device is None else {VISIBLE: ",".join(map(str, device.gpus))}
    environment = {**command.environment, **environment, **gpus}
    return replace(command, environment=environment, library=found.library), found.version


def make_judge_role(context: Context) -> ServerWorker:
    """The role that runs it; nothing is started yet.

    Raises:
        ConfigError: as `command_of_judge`; an address that is not here.
    """
    config, judge = context.config, context.config.judge
    check_address("judge.host", judge.host)
    is_shared, kind = config.shared_device("judge") is not None, Kind(judge.engine)
    port = free_port() if is_shared else 0
    url = f"http://{LOOPBACK}:{port}" if is_shared else judge.url
    command, version = command_of_judge(config, port)
    patience = Patience(start_s=judge.start_s, silent_s=config.engine.silent_s)
    locks = start_locks((os.environ | command.environment).get(VISIBLE))
    memory = MemoryLock(lock_file(context.folder, "judge")) if is_shared else None
    log = context.folder / "logs" / f"judge-{kind}.log"
    return (JudgeInShifts if is_shared else ServerWorker)(
        context,
        url,
        ServerProcess(command, log, locks, memory),
        HealthLooks(url, ADAPTERS[kind].alive, patience.beat_s, patience.look_s),
        patience,
        name=f"judge {judge.model}, {kind}/{version}",
    )
