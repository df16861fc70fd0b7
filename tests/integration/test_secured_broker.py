"""A broker that wants a password: roles and commands reach it with the same options."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import Producer

from rlstreams.check.doctor.broker import broker_checks
from rlstreams.check.doctor.check import Level
from rlstreams.streams.broker.config import HOST
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.broker.password import (
    FILE,
    USER,
    broker_settings,
    controller_settings,
    make_password,
)
from rlstreams.streams.broker.password import client_options as clients_of
from rlstreams.streams.kafka.admin import apply, listing
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.kafka.open_transactions import open_transactions
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.errors import BrokerError, ConfigError
from rlstreams.streams.log.topics import STEPS, TOPICS
from rlstreams.workers.bootstrap.parts import (
    bootstrap_of,
    client_options,
    embedded_broker,
    open_bus,
    topic_plan,
)
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from tests.factories import trainer_started
from tests.integration.monitor_process import Monitored


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    folder = tmp_path_factory.mktemp("secured")
    folder.chmod(0o755)  # as a folder that was there before is, if nobody cares
    broker = EmbeddedBroker(folder, has_password=True)
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
def config(
    secured: EmbeddedBroker, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunConfig:
    """What a user writes; the password stays in the environment."""
    state = secured.status()
    assert state is not None
    monkeypatch.setenv("KAFKA_PASSWORD", (secured.folder / FILE).read_text())
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
        [run]
        id = "{run_id}"
        [broker]
        bootstrap = "{state.bootstrap}"
        fsync = true
        [broker.options]
        "security.protocol" = "SASL_PLAINTEXT"
        "sasl.mechanisms" = "PLAIN"
        "sasl.username" = "{USER}"
        "sasl.password" = "env:KAFKA_PASSWORD"
        "socket.keepalive.enable" = "true"
        """,
        "utf-8",
    )
    return load([file])


def test_roles_and_commands_log_in_with_the_same_options(config: RunConfig) -> None:
    """Topics are applied and listed, a record is written in a transaction and read."""
    bootstrap, options = config.broker.bootstrap, client_options(config)
    assert len(TOPICS) == len(apply(bootstrap, config.run.id, topic_plan(config), options))
    with open_bus(config) as bus:
        with bus.producer("trainer.0") as producer:
            producer.commit([outgoing(STEPS, trainer_started())])
        with bus.reader(bus.beginnings(STEPS.name)) as reader:
            assert [trainer_started()] == [decoded(raw).event for raw in reader.poll(10, 10.0)]
    assert STEPS.name in listing(bootstrap, config.run.id, options)


def test_the_monitor_logs_in_with_the_same_options(config: RunConfig, tmp_path: Path) -> None:
    """Its client has other words for them."""
    apply(config.broker.bootstrap, config.run.id, topic_plan(config), client_options(config))
    with open_bus(config) as bus, bus.producer("trainer.0") as producer:
        producer.commit([outgoing(STEPS, trainer_started(step_target=77))])
    monitored = Monitored(tmp_path / "run.toml")
    try:
        monitored.until("/health", lambda _, body: body["step_target"] == 77, lambda: None)
    finally:
        monitored.end()


def test_forced_writes_are_set_and_named(config: RunConfig) -> None:
    """Applied to topics that were there before, and told by the doctor."""
    bootstrap, options = config.broker.bootstrap, client_options(config)
    lax = load([], [f"--run.id={config.run.id}"])
    apply(bootstrap, config.run.id, topic_plan(lax), options)
    before = {check.name: check for check in broker_checks(bootstrap, config)}
    assert Level.FAIL == before["topic settings"].level
    assert f"{config.run.id}.steps has flush.messages=9223372036854775807" in (
        before["topic settings"].found
    )
    assert () == apply(bootstrap, config.run.id, topic_plan(config), options)
    after = list(broker_checks(bootstrap, config))
    assert [] == [check.found for check in after if check.level is Level.FAIL]
    assert "as planned" in {c.name: c.found for c in after}["topic settings"]


def test_an_open_transaction_is_found_with_its_id(config: RunConfig) -> None:
    """What holds back the readers of a partition: from which offset on, and whose it is."""
    bootstrap, options = config.broker.bootstrap, client_options(config)
    apply(bootstrap, config.run.id, topic_plan(config), options)
    producer = Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": "left-open", **options}
    )
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(f"{config.run.id}.steps", b"x", partition=0)
    producer.flush(20)
    (found,) = open_transactions(bootstrap, config.run.id, options)
    assert (f"{config.run.id}.steps[0]", 0, "left-open") == (
        found.partition, found.first_offset, found.transactional_id,
    )  # fmt: skip
    assert found.age_s < 20
    producer.abort_transaction(20)
    assert () == open_transactions(bootstrap, config.run.id, options)


def test_another_password_is_named_at_once(config: RunConfig) -> None:
    """Not as a broker that is away, which would be waited for."""
    options = {**client_options(config), "sasl.password": "of yesterday"}
    began_s = time.monotonic()
    with (
        KafkaBus(config.broker.bootstrap, config.run.id, options=options) as bus,
        pytest.raises(BrokerError, match=r"refuses our login.*the password is not the broker's"),
    ):
        bus.ends(STEPS.name)
    assert time.monotonic() - began_s < 15.0


def test_an_empty_or_unwritable_password_opens_no_broker(tmp_path: Path) -> None:
    """An emptied file is filled anew at the next start, and until then nobody takes it for none."""
    folder = tmp_path / "broker"
    folder.mkdir()
    (folder / FILE).write_text("\n")
    for settings in (broker_settings, controller_settings, clients_of):
        with pytest.raises(ConfigError, match=r"password is empty"):
            settings(folder)
    make_password(folder)
    assert 64 == len((folder / FILE).read_text())
    assert "PLAIN" == broker_settings(folder)["sasl.mechanism.inter.broker.protocol"]
    (folder / FILE).write_text('quo"te\\')
    with pytest.raises(ConfigError, match=r"holds '\"', '\\\\': a password is of printable ASCII"):
        make_password(folder)


def test_the_controller_answers_nobody_who_has_not_logged_in(secured: EmbeddedBroker) -> None:
    """Its port is open to every user of the machine, too: a request there is not even refused."""
    state = secured.status()
    assert state is not None
    incremental_alter_configs = struct.pack(">hhih4sib", 44, 0, 1, 4, b"test", 0, 1)
    with socket.create_connection((HOST, state.controller_port), 60.0) as link:
        link.sendall(struct.pack(">i", len(incremental_alter_configs)) + incremental_alter_configs)
        with suppress(ConnectionResetError):
            assert b"" == link.recv(4)


@pytest.mark.slow
def test_without_the_password_nobody_gets_in(config: RunConfig) -> None:
    """An error of ours that names the broker, after the connection's own deadline."""
    with pytest.raises(BrokerError, match=config.broker.bootstrap):
        listing(config.broker.bootstrap, config.run.id)


def test_only_its_owner_reads_the_files(config: RunConfig, secured: EmbeddedBroker) -> None:
    """Folder, password and segments; and the run's place gives its clients the password."""
    apply(config.broker.bootstrap, config.run.id, topic_plan(config), client_options(config))
    files = [path for path in (secured.folder / "data").rglob("*.log") if path.is_file()]
    found = {path.stat().st_mode & 0o777 for path in (*files, secured.folder / FILE)}
    assert ({0o600}, 0o700) == (found, secured.folder.stat().st_mode & 0o777)


def test_a_broker_for_other_hosts_listens_there_alone_and_wants_a_password(tmp_path: Path) -> None:
    """127.0.0.2 stands for another interface: nobody answers on 127.0.0.1."""
    config = load([], [f"run.dir={tmp_path}/{{id}}", "run.id=far", "broker.host=127.0.0.2"])
    broker = embedded_broker(config)
    state = broker.start()
    try:
        assert state.bootstrap == bootstrap_of(config) == f"127.0.0.2:{state.port}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, state.port), 1.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", state.controller_port), 1.0).close()
        with pytest.raises(BrokerError):
            apply(state.bootstrap, "far", topic_plan(config), {})
        apply(state.bootstrap, "far", topic_plan(config), client_options(config))
        with open_bus(config) as bus, bus.producer("trainer.0") as producer:
            producer.commit([outgoing(STEPS, trainer_started())])  # by the advertised address
        again = embedded_broker(config).attach_or_start()
        assert again == state
    finally:
        broker.stop()
