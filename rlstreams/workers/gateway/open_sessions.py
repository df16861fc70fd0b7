"""`Calls` over a worker's engine: the sessions whose agents run here, by their keys."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlstreams.workers.gateway.keys import Keys
from rlstreams.workers.gateway.limits import least_tokens
from rlstreams.workers.gateway.open_session import OpenSession
from rlstreams.workers.gateway.port import (
    CallAnswer,
    CallRefusedError,
    CallRequest,
    Message,
    Report,
    Tool,
    ending,
    moving,
)
from rlstreams.workers.gateway.shared import SharedParts

CLOCKS_S = 3600.0  # that a key holds longer: a clock is set forth, or two hosts' differ
YOUNG_S = 60.0  # after its start, while a worker opens again what was open
STARTING_S = 1.0  # until such a request may be sent again
MAX_OVER = 10_000  # sessions that are remembered to be over, or to have gone elsewhere
LOST_S = 600.0  # that a session's client is told to come again, while nobody has the session


class OpenSessions:
    """The port `Calls`; lives on the engine's event loop."""

    def __init__(self, shared: SharedParts, keys: Keys, model: str) -> None:
        """
        Args:
            model: the name that it is served under.
        """
        self.shared = shared
        self._keys = keys
        self._model = model
        self._open: dict[str, OpenSession] = {}  # by session id
        self._heard_s: dict[str, float] = {}  # when each of these last sent something
        self._over: dict[str, None] = {}  # sessions that were shut here, the newest last
        self._lost_s: dict[str, float] = {}  # when those went elsewhere whose clients go on
        self._began_s = time.monotonic()
        self._is_ending = False

    @property
    def model(self) -> str:
        """See Calls."""
        return self._model

    @property
    def max_model_len(self) -> int:
        """See Calls."""
        return self.shared.engine.max_tokens

    def open(self, session: OpenSession, expires_in_s: float) -> str:
        """Take requests of a session's new start; returns its agent's key."""
        self._open[session.session_id] = session
        self._over.pop(session.session_id, None)
        self._lost_s.pop(session.session_id, None)
        self._heard_s[session.session_id] = time.monotonic()
        expires_s = round(time.time() + expires_in_s + CLOCKS_S)
        return self._keys.make(session.session_id, session.start, expires_s)

    async def shut(self, session: OpenSession, *, is_lost: bool = False) -> None:
        """Take no more requests of a session: its start is over; see `OpenSession.close`."""
        if self._open.get(session.session_id) is session:
            del self._open[session.session_id], self._heard_s[session.session_id]
            if is_lost and session.goes_on:
                self._lost_s[session.session_id] = time.monotonic()
            else:
                self._over[session.session_id] = None
            for shut in (self._over, self._lost_s):
                if len(shut) > MAX_OVER:
                    del shut[next(iter(shut))]
        await session.close(is_lost=is_lost)

    def silent_s(self, session: OpenSession) -> float:
        """Seconds for which an open session has sent nothing and waited for no answer."""
        if session.num_under_way or session.session_id not in self._heard_s:
            return 0.0
        return time.monotonic() - self._heard_s[session.session_id]

    @property
    def _is_young(self) -> bool:
        """Whether sessions of the worker before may still be taken up."""
        return time.monotonic() - self._began_s < YOUNG_S

    def end(self) -> None:
        """Refuse all requests from now on: the worker ends."""
        self._is_ending = True

    def check(self, key: str) -> None:
        """See Calls."""
        self._keys.read(key)

    def is_known(self, key: str) -> bool:
        """Whether the session of `key` is open here, or ended here; also whether this worker
        ends, which answers for itself."""
        session_id = self._keys.read(key).session_id
        return self._is_ending or session_id in self._open or session_id in self._over

    def is_lost(self, key: str) -> bool:
        """Whether the session of `key` went elsewhere within `LOST_S`, and its client goes on."""
        lost_s = self._lost_s.get(self._keys.read(key).session_id)
        return lost_s is not None and time.monotonic() - lost_s < LOST_S

    async def beat(self, key: str) -> None:
        """See Calls."""
        self._session(key)

    async def call(self, key: str, request: CallRequest) -> CallAnswer:
        """See Calls."""
        session = self._session(key)
        try:
            return await session.call(request)
        finally:  # from its answer on its agent is the one that is to act
            if self._open.get(session.session_id) is session:
                self._heard_s[session.session_id] = time.monotonic()

    async def report(self, key: str, report: Report) -> str:
        """See Calls."""
        return await self._session(key).report(report)

    async def close(self, key: str, kind: str, detail: str) -> None:
        """See Calls."""
        self._session(key).word.say_end(kind, detail)

    def count_tokens(
        self, key: str, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> int:
        """See Calls."""
        self._session(key)
        least = least_tokens(messages, self.shared.tokenizer, self.max_model_len)
        return least or len(self.shared.renderer.render(messages, tools))

    def _session(self, key: str) -> OpenSession:
        """
        Raises:
            CallRefusedError: 401, 410 or 503; see `Calls`.
        """
        says = self._keys.read(key)
        if self._is_ending:
            raise ending()
        session = self._open.get(says.session_id)
        is_over = says.session_id in self._over
        if session is None and self.is_lost(key):
            raise moving()
        if session is None and not is_over and self._is_young:
            raise CallRefusedError(
                503,
                "starting",
                f"session {says.session_id} is not open here, and may be soon: this worker starts",
                retry_after_s=STARTING_S,
            )
        if session is None or not session.first_start <= says.start <= session.start:
            raise CallRefusedError(
                410,
                "session_closed" if session or is_over else "session_unknown",
                f"start {says.start} of session {says.session_id} is over, or runs elsewhere",
            )
        session.check_open()
        self._heard_s[session.session_id] = time.monotonic()
        return session
