"""A producer that cannot be made: nothing was committed under it, so no outcome is unknown."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.errors import BrokerError, FencedError, StreamsError


class Refused:
    """A client whose transactional id the broker refuses."""

    def __init__(self, code: int) -> None:
        self._code = code

    def init_transactions(self, _timeout_s: float) -> None:
        raise KafkaException(KafkaError(self._code, "said the broker", fatal=True))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._FENCED, FencedError),
        (KafkaError.INVALID_TRANSACTION_TIMEOUT, BrokerError),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, BrokerError),
    ],
)
def test_a_refused_producer_says_by_whom(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StreamsError]
) -> None:
    """And not that a restart would settle it."""

    def client(_self: KafkaBus, _kind: Any, _settings: Any) -> Refused:
        return Refused(code)

    monkeypatch.setattr(KafkaBus, "_client", client)
    with pytest.raises(StreamsError, match=r"run\.rollout\.0.*said the broker") as raised:
        KafkaBus("here:9092", "run").producer("rollout.0")
    assert kind is type(raised.value)
    assert "last commit" not in str(raised.value)
