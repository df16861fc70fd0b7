"""The monitor's process: a Faust app that folds the small topics and answers over HTTP.

Consumes: `steps`, `policy-versions`, `policy-pulls`, `dead-letters`, `worker-events`, `control`.
Produces: nothing. Waits for: records. Unblocked by: the roles; SIGINT and SIGTERM end it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import ssl
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlstreams.schemas import SchemaTexts
from rlstreams.show.health.health import SMALL, HealthWatch
from rlstreams.show.web.beside import listening
from rlstreams.streams.log.errors import BrokerError, ConfigError
from rlstreams.streams.log.parts import Message
from rlstreams.streams.log.record import Partition
from rlstreams.workers.bootstrap.parts import client_options
from rlstreams.workers.config.run import RunConfig

if TYPE_CHECKING:
    import faust
    from faust.types.auth import CredentialsT


PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_KNOWN = (
    "security.protocol",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
)
_DECISIVE = ("security.", "sasl.", "ssl.", "enable.ssl.")


def credentials(options: Mapping[str, str]) -> CredentialsT | None:
    """The login that `broker.options` describes; None: neither TLS nor a password.

    Args:
        options: librdkafka properties, secrets resolved.

    Raises:
        ConfigError: an option that Faust has no word for, a mechanism that it does not speak, a
            name that is missing, or files that cannot be read.
    """
    from faust.auth import SASLCredentials, SSLCredentials

    for name in options:
        if name.startswith(_DECISIVE) and name not in _KNOWN:
            raise ConfigError(
                f"broker.options {name!r} has no counterpart in the monitor's client; it knows "
                f"{', '.join(_KNOWN)}. `rlstreams metrics` connects as the roles do"
            )
    protocol = options.get("security.protocol", PROTOCOLS[0]).upper()
    _among("security.protocol", protocol, PROTOCOLS)
    tls = _context(options) if protocol.endswith("SSL") else None
    if not protocol.startswith("SASL"):
        return SSLCredentials(tls) if tls else None
    mechanism = options.get("sasl.mechanisms", options.get("sasl.mechanism", "")).upper()
    _among("sasl.mechanisms", mechanism, MECHANISMS)
    if not options.get("sasl.username"):
        raise ConfigError("broker.options 'sasl.username' is missing")
    return SASLCredentials(
        username=options["sasl.username"],
        password=options.get("sasl.password", ""),
        ssl_context=tls,
        mechanism=mechanism,
    )


def _among(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"broker.options {name!r} is {value!r}; the monitor's client speaks {', '.join(known)}"
        )


def _context(options: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ssl.ca.location"))
        if certificate := options.get("ssl.certificate.location"):
            key, password = options.get("ssl.key.location"), options.get("ssl.key.password")
            context.load_cert_chain(certificate, key, password)
    except OSError as err:
        raise ConfigError(f"broker.options: the files of ssl.* cannot be used: {err}") from err
    check = options.get("ssl.endpoint.identification.algorithm", "https").strip().lower()
    context.check_hostname = check == "https"
    return context


TICK_S = 0.5
STOP_S = 20.0
FETCH_BYTES = 1 << 20  # of a partition at a time; one part of a record is at most 0.9 MB
BUFFERED = 64  # messages between Faust's fetcher and the fold


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
        say: called with the address, once it answers.

    Raises:
        ConfigError: faust is not installed, the port cannot be had, or a broker option is unknown.
        BrokerError: Faust ended by itself.
    """
    with listening(host, port) as held:  # Faust would only end with a traceback
        port = held.getsockname()[1]
    monitor = HealthWatch(config, schemas)
    with tempfile.TemporaryDirectory(prefix="rlstreams-monitor-") as folder:
        asyncio.run(_served(_app(config, bootstrap, host, port, folder), monitor, ends, say))


def _app(config: RunConfig, bootstrap: str, host: str, port: int, folder: str) -> faust.App:
    """An app that creates no topic and has no table, so no changelog either."""
    try:
        import faust
    except ImportError as err:
        raise ConfigError(
            f"rlstreams metrics health needs a package that is not installed ({err}): "
            "pip install 'rlstreams[monitor]'"
        ) from err
    for name in ("faust", "mode"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # /health says that nothing comes
    return faust.App(
        # A group for each process: it holds nothing, and no other monitor takes its records.
        f"{config.run.id}.monitor-{secrets.token_hex(4)}",
        broker=[f"kafka://{address.strip()}" for address in bootstrap.split(",")],
        broker_credentials=credentials(client_options(config)),
        consumer_max_fetch_size=FETCH_BYTES,
        consumer_auto_offset_reset="earliest",
        stream_buffer_maxsize=BUFFERED,
        topic_allow_declare=False,
        topic_disable_leader=True,
        autodiscover=False,
        datadir=folder,  # wanted for tables; nothing is written there
        web_bind=host,
        web_host=host,
        web_port=port,
    )


async def _served(
    app: faust.App, monitor: HealthWatch, ends: Mapping[Partition, int], say: Callable[[str], None]
) -> None:
    run = app.conf.id.rpartition(".")[0]
    # Only committed records are read. Faust means "and writes transactions", which we never do.
    app.consumer.in_transaction = True
    _feed(app, run, monitor, ends)

    async def health(view: Any, _request: Any) -> Any:  # noqa: ANN401
        now = monitor.look()
        body = {"run": run, "ok": not now.problems, **asdict(now)}
        return view.json(body, status=503 if now.problems else 200)

    app.page("/health")(health)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await app.start()
        say(f"http://{app.conf.web_host}:{app.conf.web_port}")
        while not stop.is_set() and not app.crashed:
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), TICK_S)
    finally:
        await asyncio.wait_for(app.stop(), STOP_S)
    if app.crashed and not stop.is_set():
        raise BrokerError(f"the monitor's Faust app ended by itself: {app.crash_reason!r}")


def _feed(app: faust.App, run: str, monitor: HealthWatch, ends: Mapping[Partition, int]) -> None:
    """The fold, and its clock. Topics are taken without acknowledgement: no offset is committed."""
    from faust.types import TP

    names = [f"{run}.{topic.name}" for topic in SMALL]
    topic = app.topic(*names, key_serializer="raw", value_serializer="raw", acks=False)

    async def fold(stream: Any) -> None:  # noqa: ANN401
        async for event in stream.events():
            message = event.message
            monitor.take(
                Message(
                    Partition(message.topic.removeprefix(f"{run}."), message.partition),
                    message.offset,
                    message.key or b"",
                    message.value or b"",
                    dict(message.headers or {}),
                    round(message.timestamp * 1000),
                )
            )

    async def tick() -> None:
        """Pass on how many offsets are left up to `ends`; -1: no position is known yet."""
        assigned, num_left = app.consumer.assignment(), 0
        for partition, end in ends.items():
            tp = TP(f"{run}.{partition.topic}", partition.number)
            if tp not in assigned:
                monitor.tick(-1)
                return
            num_left += max(0, end - (await app.consumer.position(tp) or 0))
        monitor.tick(num_left)

    app.agent(topic, name="fold")(fold)
    app.timer(TICK_S)(tick)
