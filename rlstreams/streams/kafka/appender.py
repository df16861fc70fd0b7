"""Single records outside of transactions, each acknowledged by itself."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from rlstreams.streams.kafka.errors import unappended
from rlstreams.streams.log.bus import Closing
from rlstreams.streams.log.errors import OutcomeUnknownError
from rlstreams.streams.log.parts import PART_BYTES, whole
from rlstreams.streams.log.record import Outgoing, Position

_SERVE_S = 0.1  # a wait for reports, which ends with the first
_CLOSE_S = 5.0  # longest wait at the end for records under way


class KafkaAppender(Closing):
    """The port `Appender` on Kafka.

    Args:
        client: an idempotent confluent producer, without a transactional id.
        run: prefix of topics.
    """

    def __init__(self, client: Any, *, run: str) -> None:  # noqa: ANN401
        self._client = client
        self._prefix = f"{run}."
        self._is_closed = False
        self._server = threading.Thread(target=self._serve, name="appender", daemon=True)
        self._server.start()

    def append(self, record: Outgoing) -> Future[Position]:
        """See `Appender`."""
        if len(record) > PART_BYTES:
            raise ValueError(f"a record of {len(record)} bytes takes several parts")
        answer: Future[Position] = Future()
        # It is on its way: who waits for it may go, but `cancel` would have `delivered` raise, and
        # that ends the thread that serves all other records.
        answer.set_running_or_notify_cancel()

        def delivered(error: Any, message: Any) -> None:  # noqa: ANN401
            if error is not None:
                answer.set_exception(unappended(error))
            elif message.offset() is None:  # the broker took it for a duplicate
                answer.set_exception(OutcomeUnknownError("a record was acknowledged without place"))
            else:
                answer.set_result(Position(record.topic, message.partition(), message.offset()))

        settings: dict[str, Any] = {"headers": list(record.headers.items())}
        if record.partition is not None:
            settings["partition"] = record.partition
        try:
            self._client.produce(
                self._prefix + record.topic,
                whole(record.value),
                record.key,
                on_delivery=delivered,
                **settings,
            )
        except BufferError:
            answer.set_exception(OutcomeUnknownError("the client's queue is full: no broker takes"))
        return answer

    def _serve(self) -> None:
        while not self._is_closed:
            with suppress(SystemError):  # see `producer._serve`
                self._client.poll(_SERVE_S)

    def close(self) -> None:
        """Wait at most `_CLOSE_S` for records under way, and release the connection; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._server.join()
        with suppress(SystemError):
            self._client.flush(_CLOSE_S)
