"""Commits on a thread of their own: the role continues while the broker settles the transaction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from rlstreams.streams.log.errors import OutcomeUnknownError

_GRACE_S = 15.0  # beyond its own deadline, in which an abort may end


class KafkaCommit:
    """The port `Commit` on Kafka.

    Args:
        commit: what waits for the broker; keeps to `commit_s` by itself, as far as the client does.
        transactional_id: for messages.
        commit_s: how long it may take.
    """

    def __init__(self, commit: Callable[[], None], transactional_id: str, commit_s: float) -> None:
        self._answer: Future[None] = Future()
        self._id = transactional_id
        self._deadline = time.monotonic() + commit_s + _GRACE_S

        def run() -> None:
            try:
                commit()
                self._answer.set_result(None)
            except BaseException as err:  # noqa: BLE001  (raised by `result`)
                self._answer.set_exception(err)

        # A daemon: a call that never returns must not keep the process.
        threading.Thread(target=run, name="commit", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """See `Commit`."""
        if self._answer.done():
            return True
        if wait([self._answer], timeout_s).done:
            return True
        if time.monotonic() > self._deadline:
            raise OutcomeUnknownError(
                f"transactional id {self._id}: its commit does not return, long after its deadline "
                "(the client is stuck); restart this process, the start settles it"
            )
        return False

    def result(self) -> None:
        """See `Commit`."""
        self._answer.result(0)
