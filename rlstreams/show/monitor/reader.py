"""Faust's connection to Kafka, as a reader that leaves no trace.

Two things differ from Faust's own. It reads committed records only: Faust asks for that only where
it writes transactions itself. And only our pages are served. Offsets are not committed, for the
topics are asked for without acknowledgement, so the group, which has a name of its own for each
process, holds nothing and the broker forgets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiokafka
import faust
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from faust.auth import SASLCredentials, SSLCredentials
from faust.transport.drivers.aiokafka import (
    AIOKafkaConsumerThread,
    Consumer,
    Transport,
    credentials_to_aiokafka_auth,
    server_list,
)
from faust.types.auth import CredentialsT
from faust.web.drivers.aiohttp import Web

from rlstreams.show.monitor.options import Login
from rlstreams.streams.log.errors import ConfigError

FETCH_BYTES = 1 << 20  # of a partition at a time; one part of a record is at most 0.9 MB
BUFFERED = 64  # messages between Faust's fetcher and the fold


class ReaderThread(AIOKafkaConsumerThread):
    """Makes the client."""

    def _create_worker_consumer(self, transport: Any) -> Any:  # noqa: ANN401
        conf = self.app.conf
        auth: Mapping[str, Any] = credentials_to_aiokafka_auth(conf.broker_credentials)
        return aiokafka.AIOKafkaConsumer(
            bootstrap_servers=server_list(transport.url, transport.default_port),
            client_id=conf.broker_client_id,
            group_id=conf.id,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            partition_assignment_strategy=[RoundRobinPartitionAssignor],
            max_partition_fetch_bytes=conf.consumer_max_fetch_size,
            session_timeout_ms=round(conf.broker_session_timeout * 1000),
            heartbeat_interval_ms=round(conf.broker_heartbeat_interval * 1000),
            request_timeout_ms=round(conf.broker_request_timeout * 1000),
            **auth,
        )


class Reader(Consumer):
    """Has a `ReaderThread`."""

    def _new_consumer_thread(self) -> ReaderThread:
        return ReaderThread(self, loop=self.loop, beacon=self.beacon)


class ReadTransport(Transport):
    """Has a `Reader`."""

    Consumer = Reader


class OwnPages(Web):
    """Without Faust's pages about its tables and its router."""

    default_blueprints = ()
    production_blueprints = ()


class ReadingApp(faust.App):
    """A Faust app that reads."""

    def _new_transport(self) -> ReadTransport:
        return ReadTransport(self.conf.broker_consumer, self, loop=self.loop)

    def _new_web(self) -> OwnPages:
        return OwnPages(self)


def reading_app(
    name: str, bootstrap: str, login: Login, *, host: str, port: int, folder: str
) -> ReadingApp:
    """An app that creates no topic and has no table, so no changelog either.

    Args:
        name: of its consumer group.
        bootstrap: `host:port[,host:port]`.
        folder: Faust wants one for tables; nothing is written there.

    Raises:
        ConfigError: the login is one that Faust refuses.
    """
    return ReadingApp(
        name,
        broker=[f"kafka://{address.strip()}" for address in bootstrap.split(",")],
        broker_credentials=_credentials(login),
        consumer_max_fetch_size=FETCH_BYTES,
        stream_buffer_maxsize=BUFFERED,
        topic_allow_declare=False,
        topic_disable_leader=True,
        autodiscover=False,
        datadir=folder,
        web_bind=host,
        web_host=host,
        web_port=port,
    )


def _credentials(login: Login) -> CredentialsT | None:
    if login.protocol == "PLAINTEXT":
        return None
    if login.protocol == "SSL":
        return SSLCredentials(login.tls)
    if not login.username:
        raise ConfigError("broker.options 'sasl.username' is missing")
    return SASLCredentials(
        username=login.username,
        password=login.password,
        ssl_context=login.tls,
        mechanism=login.mechanism,
    )
