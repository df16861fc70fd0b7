"""A broker that speaks TLS, with a certificate that only its own authority knows."""

from __future__ import annotations

import gc
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.errors import BrokerError
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import STEPS, TOPICS
from rlstreams.streams.run.open_run import open_run
from tests.factories import trainer_started

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes a certificate")
PLAN = TopicPlan(rollout_workers=1, logprob_workers=1)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 127.0.0.1, signed by itself; its key lies beside it."""
    folder = tmp_path_factory.mktemp("tls")
    words = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=broker -keyout key.pem -out own.pem"
    )
    words += " -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *words.split()], cwd=folder, check=True, capture_output=True, timeout=60
    )
    return folder / "own.pem"


@pytest.fixture(scope="module")
def bootstrap(certificate: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the broker: clients come by TLS alone."""
    both = certificate.parent / "both.pem"
    both.write_text((certificate.parent / "key.pem").read_text() + certificate.read_text())
    settings = {
        "inter.broker.listener.name": "SSL",
        "listener.security.protocol.map": "SSL:SSL,CONTROLLER:PLAINTEXT",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(both),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificate),
    }
    broker = EmbeddedBroker(tmp_path_factory.mktemp("broker"), settings=settings)
    yield broker.start().bootstrap
    broker.stop()


def test_a_run_is_written_and_read_by_tls(bootstrap: str, certificate: Path, run_id: str) -> None:
    """Topics, a transaction and a reader, with the same two options."""
    options = {"security.protocol": "SSL", "ssl.ca.location": str(certificate)}
    assert len(TOPICS) == len(apply(bootstrap, run_id, PLAN, options))
    with KafkaBus(bootstrap, run_id, options=options) as bus:
        with bus.producer("trainer.0") as producer:
            producer.commit([outgoing(STEPS, trainer_started())])
        with bus.reader(bus.beginnings(STEPS.name)) as reader:
            assert [trainer_started()] == [decoded(raw).event for raw in reader.poll(10, 10.0)]
    with open_run(run_id, bootstrap=bootstrap, options=options) as log:
        assert log.configuration is not None


def test_who_does_not_know_its_authority_is_told_which_option_is_missing(
    bootstrap: str, run_id: str
) -> None:
    """Who comes without TLS is in `unit/streams/test_kafka_errors.py`."""
    with pytest.raises(BrokerError, match=r"ssl\.ca\.location") as caught:
        apply(bootstrap, run_id, PLAN, {"security.protocol": "SSL"})
    del caught  # its traceback holds the sockets that kafka-python leaves open where it fails
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
