"""The monitor's process: a Faust app that folds the small topics and answers over HTTP.

Consumes: `steps`, `policy-versions`, `policy-pulls`, `dead-letters`, `worker-events`, `control`.
Produces: nothing. Waits for: records. Unblocked by: the roles; SIGINT and SIGTERM end it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlstreams.schemas import SchemaTexts
from rlstreams.show.monitor.answers import SMALL, Answer, Monitor
from rlstreams.show.monitor.health import HealthWatch
from rlstreams.show.monitor.options import login
from rlstreams.show.monitor.page import PAGE
from rlstreams.streams.log.errors import BrokerError, ConfigError
from rlstreams.streams.log.parts import Message
from rlstreams.streams.log.record import Partition
from rlstreams.workers.bootstrap.parts import client_options
from rlstreams.workers.config.run import RunConfig

if TYPE_CHECKING:
    from rlstreams.show.monitor.reader import ReadingApp

TICK_S = 0.5
STOP_S = 20.0


def serve(
    config: RunConfig,
    bootstrap: str,
    ends: Mapping[Partition, int],
    schemas: SchemaTexts,
    *,
    host: str,
    port: int,
    say: Callable[[str], None],
) -> None:
    """Answer until SIGINT or SIGTERM.

    Args:
        ends: where the small topics end now: read up to there, the monitor knows the run.
        schemas: of the run's bus.
        port: 0: a free one.
        say: told the address, once it answers.

    Raises:
        ConfigError: faust is not installed, the port cannot be had, or a broker option is unknown.
        BrokerError: Faust ended by itself.
    """
    port = _port(host, port)
    monitor = Monitor(config.run.id, HealthWatch(config), schemas)
    with tempfile.TemporaryDirectory(prefix="rlstreams-monitor-") as folder:
        asyncio.run(_served(_app(config, bootstrap, host, port, folder), monitor, ends, say))


def _app(config: RunConfig, bootstrap: str, host: str, port: int, folder: str) -> ReadingApp:
    try:
        from rlstreams.show.monitor.reader import reading_app
    except ImportError as err:
        raise ConfigError(
            f"rlstreams monitor needs a package that is not installed ({err}): "
            "pip install 'rlstreams[monitor]'"
        ) from err
    # A group for each process: it holds nothing, and no other monitor takes its records.
    name = f"{config.run.id}.monitor-{secrets.token_hex(4)}"
    logging.getLogger("faust").setLevel(logging.ERROR)
    logging.getLogger("mode").setLevel(logging.ERROR)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # /health says that nothing comes
    return reading_app(
        name, bootstrap, login(client_options(config)), host=host, port=port, folder=folder
    )


async def _served(
    app: ReadingApp, monitor: Monitor, ends: Mapping[Partition, int], say: Callable[[str], None]
) -> None:
    run = app.conf.id.rpartition(".")[0]
    _feed(app, run, monitor, ends)
    _pages(app, monitor)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await app.start()
        say(f"http://{app.conf.web_host}:{app.conf.web_port}")
        while not stop.is_set() and not app.crashed:
            await _until(stop, TICK_S)
    finally:
        await asyncio.wait_for(app.stop(), STOP_S)
    if app.crashed and not stop.is_set():
        raise BrokerError(f"the monitor's Faust app ended by itself: {app.crash_reason!r}")


async def _until(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return


def _feed(app: ReadingApp, run: str, monitor: Monitor, ends: Mapping[Partition, int]) -> None:
    """The fold, and its clock."""
    names = [f"{run}.{topic.name}" for topic in SMALL]
    topic = app.topic(*names, key_serializer="raw", value_serializer="raw", acks=False)

    async def fold(stream: Any) -> None:  # noqa: ANN401
        async for event in stream.events():
            monitor.take(_message(event.message, run))

    app.agent(topic, name="fold")(fold)

    async def tick() -> None:
        monitor.tick(await _behind(app, run, ends))

    app.timer(TICK_S)(tick)


async def _behind(app: ReadingApp, run: str, ends: Mapping[Partition, int]) -> int:
    """Offsets that are left of `ends`, before the client's position; -1: it has none yet."""
    from faust.types import TP

    assigned = app.consumer.assignment()
    num_left = 0
    for partition, end in ends.items():
        tp = TP(f"{run}.{partition.topic}", partition.number)
        if tp not in assigned:
            return -1
        position = await app.consumer.position(tp)
        num_left += max(0, end - (position or 0))
    return num_left


def _message(message: Any, run: str) -> Message:  # noqa: ANN401
    """Faust's message as ours."""
    return Message(
        Partition(message.topic.removeprefix(f"{run}."), message.partition),
        message.offset,
        message.key or b"",
        message.value or b"",
        dict(message.headers or {}),
        round(message.timestamp * 1000),
    )


def _pages(app: ReadingApp, monitor: Monitor) -> None:
    """What is served."""

    def page(path: str, answer: Callable[[], Answer]) -> None:
        async def get(view: Any, _request: Any) -> Any:  # noqa: ANN401
            found = answer()
            return view.json(found.body, status=found.status)

        get.__name__ = path.strip("/")  # Faust tells pages apart by it
        app.page(path)(get)

    page("/windows", monitor.windows)
    page("/workers", monitor.workers)
    page("/health", monitor.health)

    async def index(view: Any, _request: Any) -> Any:  # noqa: ANN401
        return view.html(PAGE)

    app.page("/")(index)


def _port(host: str, port: int) -> int:
    """The port, if it can be had; Faust would only end with a traceback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as err:
            raise ConfigError(
                f"--host {host} --port {port} cannot be had: {err}; choose another"
            ) from err
        return int(probe.getsockname()[1])
