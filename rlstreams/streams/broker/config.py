"""Configuration of the embedded broker: its properties, its logging, its command line. Pure."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rlstreams.streams.log.errors import ConfigError

HOST = "127.0.0.1"
STARTED = "Kafka Server started"  # logged by KafkaRaftServer once the broker is unfenced
DISK_FULL = "No space left on device"
FENCED = "Fencing broker 1"  # logged by the controller once the dead broker's session is over
# Logged once a group's coordinator has given up, for good (decision 0013).
OUT_OF_SYNC = "is out of sync with the underlying log"
CLEAN = ".kafka_cleanshutdown"  # in the data folder after a clean stop, and only then

# Java takes from the locale how paths are encoded, and in what language errors of the system are:
# here paths are UTF-8, and a full disk says `DISK_FULL`.
ENVIRONMENT = MappingProxyType({"LC_ALL": "C.UTF-8"})
# Every append is on disk before it is answered: for all topics, those of groups' positions and of
# transactions' states included.
FSYNC = {"log.flush.interval.messages": "1"}
_NOTHING: Mapping[str, str] = MappingProxyType({})
_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    # One node: one replica of everything.
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # Few partitions: each costs time at the first use of its topic.
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "1",
    # 110 MB less memory than the default buffer of the cleaner.
    "log.cleaner.dedupe.buffer.size": "16777216",
    "log.cleaner.threads": "1",
    "log.segment.bytes": "67108864",
    # A killed worker's partitions move after the session timeout, and not before.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "3000",
    "group.consumer.min.session.timeout.ms": "3000",
    "group.consumer.session.timeout.ms": "3000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
    # A dead writer's transaction blocks its readers for its timeout plus this.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # The default of 9 s makes a restart after a kill take 12 s.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "1000",
    # A run that lies still for longer than the default of 7 days keeps its positions.
    "offsets.retention.minutes": "5256000",
}

_LOG4J2 = f"""\
<Configuration status="ERROR">
  <Appenders>
    <File name="file" fileName="${{sys:rlstreams.log}}" append="true">
      <PatternLayout pattern="%d{{ISO8601}} %p %m (%c{{1}})%n"/>
    </File>
  </Appenders>
  <Loggers>
    <!-- Says "{STARTED}". -->
    <Logger name="kafka.server.KafkaRaftServer" level="INFO"/>
    <Logger name="org.apache.kafka.controller.ReplicationControlManager" level="LEVEL"/>
    <Root level="WARN"><AppenderRef ref="file"/></Root>
  </Loggers>
</Configuration>
"""


def log4j2(*, controller: str = "WARN") -> str:
    """Return the text of `log4j2.xml`.

    Args:
        controller: log level of the controller's decisions about brokers; INFO logs `FENCED`.
    """
    return _LOG4J2.replace("LEVEL", controller)


def fence_properties(data: Path, controller_port: int, extra: Mapping[str, str]) -> str:
    """The text of the properties under which the node is a controller and no broker.

    Args:
        extra: properties beside these.
    """
    settings = {
        "process.roles": "controller",
        "node.id": "1",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"CONTROLLER://{HOST}:{controller_port}",
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "broker.session.timeout.ms": "1000",
        "broker.heartbeat.interval.ms": "500",
        "log.dirs": str(data.resolve()),
        **extra,
    }
    return _properties(settings)


def server_properties(
    data: Path,
    port: int,
    controller_port: int,
    extra: Mapping[str, str] = _NOTHING,
    host: str = HOST,
) -> str:
    """The text of `server.properties`.

    Args:
        host: address for clients; the controller listens on loopback.
        extra: broker properties that win over ours. `inter.broker.listener.name` names the
            listener that clients use as well: a security protocol, PLAINTEXT if it is not given.

    Raises:
        ConfigError: the path has a character that means something else there, or no text.
    """
    path = str(data.resolve())
    if set(",\\\n") & set(path):
        raise ConfigError(f"broker folder {data}: Kafka cannot use a path with `,` or `\\`")
    if any("\ud800" <= character <= "\udfff" for character in path):
        raise ConfigError(f"broker folder {path!r}: Java cannot use a path that is not UTF-8")
    listener = extra.get("inter.broker.listener.name", "PLAINTEXT")
    settings = {
        **_SETTINGS,
        "listeners": f"{listener}://{host}:{port},CONTROLLER://{HOST}:{controller_port}",
        # Static voters: the log does not remember the port, so the next start may choose another.
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "log.dirs": str(data.resolve()),
        **extra,
    }
    return _properties(settings)


def _properties(settings: Mapping[str, str]) -> str:
    """Text of a properties file. Java reads it as Latin-1, other characters by their number."""
    lines = "".join(f"{name}={value}\n" for name, value in settings.items())
    return "".join(one if one.isascii() else json.dumps(one)[1:-1] for one in lines)


# Options that compile soon rather than well: a start, a few topics read and a stop take 7.5 s of
# CPU time instead of 12.5, the reader's 4 s included (`inspect` of a demo of 12 steps, Java 25, 2
# cores).
FOR_A_LOOK = ("-XX:TieredStopAtLevel=1",)


def java_command(
    java: Path, classpath: Sequence[Path], folder: Path, heap_mb: int, options: Sequence[str]
) -> tuple[str, ...]:
    """The JVM with the settings that keep the broker near 200 MB; a main class comes next."""
    home = folder.resolve()
    return (
        str(java),
        f"-Xmx{heap_mb}m",
        "-Xms64m",
        "-XX:+UseSerialGC",
        "-XX:+ExitOnOutOfMemoryError",
        *options,
        f"-XX:ErrorFile={home / 'jvm-crash.log'}",
        "-Djava.net.preferIPv4Stack=true",
        "-Djava.awt.headless=true",
        *java_logging(home / "log4j2.xml", home / "server.log"),
        "-cp",
        ":".join(str(path.resolve()) for path in classpath),
    )


def java_logging(log4j2_file: Path, log: Path) -> tuple[str, str]:
    """Return JVM options for the paths of `log4j2`'s text and of the log; the last one counts."""
    return (
        f"-Dlog4j2.configurationFile={log4j2_file.resolve()}",
        f"-Drlstreams.log={log.resolve()}",
    )


def new_cluster_id() -> str:
    """Return 16 random bytes in unpadded URL-safe base64, as Kafka writes its UUIDs.

    An id that begins with a dash is left out: the format tool would read it as an option.
    """
    while True:
        text = base64.urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")
        if not text.startswith("-"):
            return text
