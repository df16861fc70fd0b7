"""The embedded broker on a real folder: start, stop, restart, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient

from rlstreams.__main__ import main
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.log.errors import BrokerError, ConfigError


@pytest.fixture
def own_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedBroker]:
    """A broker that the test may kill, in a folder of any name, for a user of any locale."""
    monkeypatch.setenv("LC_ALL", "C")
    embedded = EmbeddedBroker(tmp_path / "Läufe (alte) #1 %41 \N{SNAKE}" / "broker")
    yield embedded
    embedded.stop()


def test_a_folder_in_use_a_clean_stop_and_files_that_were_lost_or_damaged(
    own_broker: EmbeddedBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rlstreams broker` starts, shows and stops it. A second start is refused by name; what a
    power cut emptied is made anew, the file that names the cluster is put back from a copy; of what
    cannot be mended the error says the path and the cure, or what the broker said before it
    ended."""

    def broker(verb: str) -> int:
        return main(["broker", verb, str(own_broker.folder)])

    assert (broker("status"), broker("start")) == (1, 0)
    state = own_broker.status()
    assert state is not None
    assert (broker("start"), broker("status")) == (78, 0)
    assert f"serves {state.bootstrap}" in capsys.readouterr().out
    other = EmbeddedBroker(own_broker.folder)
    assert state == other.status() == other.attach_or_start()
    with pytest.raises(ConfigError, match=f"in use by process {state.pid}"):
        other.start()
    write(state.bootstrap, "kept", [b"one"])

    assert broker("stop") == 0
    assert own_broker.status() is None
    assert broker("stop") == 1
    data = own_broker.folder / "data"
    assert (data / ".kafka_cleanshutdown").is_file()

    (own_broker.folder / "broker.json").write_text("")
    assert own_broker.status() is None
    checkpoint = data / "kept-0" / "leader-epoch-checkpoint"
    checkpoint.write_text("0\nnonsense\n")
    with pytest.raises(BrokerError, match=f"{re.escape(str(checkpoint))} is damaged; remove it"):
        own_broker.start()
    checkpoint.unlink()
    properties = data / "meta.properties"
    properties.unlink()
    assert [b"one"] == read(own_broker.start().bootstrap, "kept", 1)

    assert own_broker.stop() is True
    text = properties.read_text(encoding="utf-8")
    properties.write_text(re.sub("node.id=1", "node.id=7", text), encoding="utf-8")
    with pytest.raises(BrokerError, match=r"(?s)ended while starting.*7"):
        own_broker.start()
    assert own_broker.status() is None
    for file in (properties, own_broker.folder / "meta.properties"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"meta\.properties is gone, which says of which cluster"):
        own_broker.start()


@pytest.mark.slow
def test_a_broker_that_does_not_react_is_killed(own_broker: EmbeddedBroker) -> None:
    """A stopped process takes no SIGTERM; 15 s later it is gone all the same."""
    state = own_broker.start()
    os.kill(state.pid, signal.SIGSTOP)

    assert own_broker.stop() is True
    assert own_broker.status() is None


def test_a_start_that_is_broken_off_leaves_no_broker(tmp_path: Path) -> None:
    """Its process is known to nobody yet, so whoever started it ends it."""
    folder = tmp_path / "broker"
    command = subprocess.Popen(
        [sys.executable, "-m", "rlstreams", "broker", "start", str(folder)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    until_s = time.monotonic() + 120.0
    while (state := EmbeddedBroker(folder)._read_state()) is None or not state.pid:
        assert time.monotonic() < until_s, "no broker was begun"
        assert command.poll() is None, command.stderr.read() if command.stderr else ""
        time.sleep(0.01)
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=120)
    assert 128 + signal.SIGTERM == command.returncode
    with pytest.raises(ProcessLookupError):
        os.kill(state.pid, 0)


def write(bootstrap: str, topic: str, values: list[bytes]) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    admin.create_topics(
        {topic: {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True
    )
    admin.close()
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all")
    sent = [producer.send(topic, value, partition=0) for value in values]
    for future in sent:
        future.get(timeout=120)
    producer.close()


def read(bootstrap: str, topic: str, num_records: int) -> list[bytes]:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    consumer.assign([TopicPartition(topic, 0)])
    values: list[bytes] = []
    deadline = time.monotonic() + 120
    while len(values) < num_records and time.monotonic() < deadline:
        for records in consumer.poll(timeout_ms=500).values():
            values += [record.value for record in records]
    consumer.close()
    return values
