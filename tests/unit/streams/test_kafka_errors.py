"""The table of Kafka errors, and when silence is an outage."""

from __future__ import annotations

import socket
import time

import pytest
from confluent_kafka import KafkaError, KafkaException

from rlstreams.streams.kafka import bus as bus_module
from rlstreams.streams.kafka.errors import (
    Outage,
    aborted_transaction,
    broker_error,
    lost_transaction,
    until,
)
from rlstreams.streams.log.errors import (
    AbortedError,
    BrokerError,
    FencedError,
    OutcomeUnknownError,
    RefusedError,
)

TRANSPORT = KafkaError(KafkaError._TRANSPORT, "refused")


def failing(*codes: int, answer: str = "answer"):
    """A call that fails with these codes in turn, then answers."""
    left = list(codes)

    def call() -> str:
        if left:
            raise KafkaException(KafkaError(left.pop(0)))
        return answer

    return call


def test_a_lost_transaction_names_the_record_that_was_refused() -> None:
    """A missing right shows as a transaction that cannot end, which says nothing of its cause."""
    ended = KafkaError(KafkaError.INVALID_TXN_STATE, "cannot end", fatal=True)
    refused = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    text = str(lost_transaction(ended, "run.rollout.0", refused))
    assert "after a record was refused: TOPIC_AUTHORIZATION_FAILED" in text
    assert "refused" not in str(lost_transaction(ended, "run.rollout.0", ended))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._FENCED, FencedError),
        (KafkaError.INVALID_PRODUCER_EPOCH, FencedError),
        (KafkaError.INVALID_TXN_STATE, OutcomeUnknownError),
        (KafkaError._TIMED_OUT, OutcomeUnknownError),
    ],
)
def test_a_lost_transaction_names_its_id(code: int, kind: type[Exception]):
    """Only fencing is fencing; whatever else no abort cures has an unknown outcome."""
    error = lost_transaction(KafkaError(code, "said", fatal=True), "run.rollout.0")
    assert kind is type(error)
    assert "run.rollout.0" in str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError.UNKNOWN_MEMBER_ID, AbortedError),
        (KafkaError.ILLEGAL_GENERATION, AbortedError),
        (KafkaError._INCONSISTENT, AbortedError),
        (KafkaError.OFFSET_METADATA_TOO_LARGE, BrokerError),
        (KafkaError.MSG_SIZE_TOO_LARGE, RefusedError),
    ],
)
def test_an_aborted_transaction_may_be_sent_again_or_not(code: int, kind: type[Exception]):
    """A batch that would be refused for ever is no AbortedError."""
    assert kind is type(aborted_transaction(KafkaError(code, "said"), "id"))


def test_a_broker_without_the_group_protocol_is_named():
    error = broker_error(KafkaError(KafkaError._UNSUPPORTED_FEATURE, "no"), "joining g", "h:1")
    assert "h:1" in str(error)
    assert "KIP-848" in str(error)


def test_noise_is_retried_until_the_deadline():
    """A moved coordinator is asked again; a refusal is not; nobody waits for ever."""
    later = time.monotonic() + 10
    noisy = failing(KafkaError.NOT_COORDINATOR, KafkaError._TIMED_OUT)
    assert "answer" == until(later, noisy, "asking", "h:1")
    with pytest.raises(BrokerError, match="asking: TOPIC_AUTHORIZATION_FAILED"):
        until(later, failing(KafkaError.TOPIC_AUTHORIZATION_FAILED), "asking", "h:1")
    with pytest.raises(BrokerError, match="_TIMED_OUT"):
        until(time.monotonic(), failing(KafkaError._TIMED_OUT), "asking", "h:1")


def test_an_outage_needs_silence_and_a_failed_question():
    """Within the limit, after an answer, and when the broker answers the question: no error."""
    dead = failing(*[KafkaError._TRANSPORT] * 9)
    patient, hasty = Outage("h:1", 60.0), Outage("h:1", 0.0)
    for outage in (patient, hasty):
        outage.check(dead)
        outage.seen(TRANSPORT)
    patient.check(dead)
    hasty.check(failing())
    hasty.check(dead)
    hasty.seen(TRANSPORT)
    with pytest.raises(BrokerError, match="h:1 has been unreachable since"):
        hasty.check(dead)
    hasty.over()
    hasty.check(dead)


def test_an_answer_that_was_slept_through_is_asked_for_again() -> None:
    """A future's time is over although the broker answered: this process was suspended."""
    answers = iter([TimeoutError(), "answer"])

    def call() -> str:
        answer = next(answers)
        if isinstance(answer, TimeoutError):
            raise answer
        return str(answer)

    assert until(time.monotonic() + 10, call, "asking", "h:1") == "answer"

    def silent() -> str:
        raise TimeoutError

    with pytest.raises(BrokerError, match="h:1: asking: no answer in time"):
        until(time.monotonic(), silent, "asking", "h:1")


def test_a_port_that_is_no_kafka_is_told_from_one_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For every question of a role and of a reader; which of the two the client does not say."""
    monkeypatch.setattr(bus_module, "ANSWER_S", 0.3)
    monkeypatch.setattr(bus_module, "LOOK_UP_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        bus = bus_module.KafkaBus(address, "run")
        with pytest.raises(BrokerError, match=r"something listens there and does not speak Kafka"):
            bus.partitions("steps")
    with pytest.raises(BrokerError, match=rf"no broker answers at {address}.*broker\.bootstrap"):
        bus.partitions("steps")
