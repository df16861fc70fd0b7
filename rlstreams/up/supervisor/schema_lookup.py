"""Schemas of other releases for the loop of `up`, which comes round while nobody answers.

The client of a broker that died waits half a minute for its answer, and then fails. Meanwhile the
broker is started again, roles end and are restarted, and keys are pressed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rlstreams.streams.log.errors import BrokerError, StreamsError
from rlstreams.up.supervisor.background_call import BackgroundCall
from rlstreams.up.supervisor.broker import RETURN_S

LIMIT_S = RETURN_S  # as long as the reader of the topics waits for its broker
_WAIT_S = 0.1  # of one turn; most answers are there sooner


class AwaitedError(StreamsError):
    """The answer is under way: ask again in the next turn. Nothing is known of the record yet."""


class SchemaLookup:
    """The port `schemas.SchemaTexts`; one question at a time, in a thread of its own.

    Args:
        ask: the text under a fingerprint, or None; of a catalogue that nobody else uses.
    """

    def __init__(self, ask: Callable[[bytes], str | None]) -> None:
        self._ask = ask
        self._texts: dict[bytes, str] = {}
        self._call: BackgroundCall[tuple[bytes, str | None]] | None = None
        self._since_s: float | None = None  # monotonic; asked for and not answered

    def get(self, print_: bytes, /) -> str | None:
        """The schema text under a fingerprint; None: the run does not have it.

        Raises:
            AwaitedError: the broker has not answered yet.
            BrokerError: it has not for `LIMIT_S`.
        """
        while print_ not in self._texts:
            asked, text = self._answer(print_)
            if text is not None:
                self._texts[asked] = text
            elif asked == print_:
                return None
        return self._texts[print_]

    def _answer(self, print_: bytes) -> tuple[bytes, str | None]:
        """What was asked, which may have been about another record, and its answer."""
        if self._call is None:
            self._call = BackgroundCall(lambda: (print_, self._ask(print_)), math.inf)
            self._since_s = self._since_s or time.monotonic()
        if not self._call.wait(_WAIT_S):
            raise self._awaited(print_, None)
        question, self._call = self._call, None
        if question.answer is None:
            time.sleep(_WAIT_S)  # it may have been refused at once
            raise self._awaited(print_, question.error)
        self._since_s = None
        return question.answer

    def _awaited(self, print_: bytes, error: StreamsError | None) -> StreamsError:
        waited_s = time.monotonic() - (self._since_s or math.inf)
        said = f"the schema {print_.hex()} of a record was asked for {waited_s:.1f} s"
        if waited_s < LIMIT_S:
            return AwaitedError(f"{said} ago")
        return BrokerError(f"{said}, limit {LIMIT_S:g} s: {error or 'no answer'}")
