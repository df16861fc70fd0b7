"""A blocking call, such as a question to the broker, that the loop of `up` does not wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from rlstreams.streams.log.errors import StreamsError

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """One call in a daemon thread; over when it answered, failed, or `limit_s` has passed."""

    def __init__(self, ask: Callable[[], T], limit_s: float) -> None:
        self._ask = ask
        self._until_s = time.monotonic() + limit_s
        self._done = threading.Event()
        self.answer: T | None = None  # None as well where the broker did not answer
        self.error: StreamsError | None = None  # how it refused, or that it was silent
        threading.Thread(target=self._run, name="background-call", daemon=True).start()

    def is_over(self) -> bool:
        """Whether nothing more is to be waited for."""
        return self._done.is_set() or time.monotonic() >= self._until_s

    def wait(self, timeout_s: float) -> bool:
        """Whether it answered or failed within that time."""
        return self._done.wait(timeout_s)

    def _run(self) -> None:
        try:
            self.answer = self._ask()
        except StreamsError as err:
            self.error = err
        except Exception as err:  # noqa: BLE001  (who waits must hear of it)
            self.error = StreamsError(f"{type(err).__name__}: {err}")
        finally:
            self._done.set()
