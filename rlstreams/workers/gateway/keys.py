"""Session keys, which agents send as their API key and by which a gateway finds the session; and
runner keys, by which an agent's sessions are asked for.

A key is the session's id, its start and when it expires, sealed by HMAC-SHA-256 with the run's
secret. So a gateway that forgot everything, or another one of the run, knows the session. A key is
a capability: its holder may call the model as that session. A runner's key is the name of a
remote agent, sealed alike: its holder is given that agent's sessions, one after the other, and
it holds as long as the run's secret. Neither is ever logged; `shown` is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlstreams.workers.gateway.port import CallRefusedError

PREFIX, RUNNER_PREFIX = "rls-", "rlr-"
_MAC_BYTES = 16
_LONGEST = 1024  # characters of a key
# By prefix, so that a seal of the secret for another use, or another kind of key, is not valid.
_ENVELOPES = {PREFIX: b"rlstreams session key 1\n", RUNNER_PREFIX: b"rlstreams runner key 1\n"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKey:
    """Content of a session's key."""

    session_id: str
    start: int  # of its agent, from 0


class Keys:
    """Makes and reads keys."""

    def __init__(self, secret: str, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            secret: the run's, as weights are pulled with.
            clock: Unix time, in seconds.
        """
        if not secret:
            raise ValueError("the run's secret is empty: keys made with it would seal nothing")
        self._secret = secret.encode()
        self._clock = clock

    def make(self, session_id: str, start: int, expires_s: int) -> str:
        """The key of one start of a session's agent; only letters, digits, `-` and `_`."""
        return self._made(PREFIX, f"{start} {expires_s} {session_id}".encode())

    def make_runner(self, agent: str) -> str:
        """The key by which runners ask for sessions of a remote agent; of the same letters."""
        return self._made(RUNNER_PREFIX, agent.encode())

    def runner(self, key: str) -> str:
        """The agent whose runner has `key`.

        Raises:
            CallRefusedError: 401; this run did not make it, or it is a session's.
        """
        says = self._opened(RUNNER_PREFIX, key)
        if says is None:
            raise CallRefusedError(
                401, "invalid_api_key", "the key is not one of this run's runner keys"
            )
        return says.decode()

    def read(self, key: str) -> SessionKey:
        """Return the content of `key`.

        Raises:
            CallRefusedError: 401; there is none, this run did not make it, or it has expired.
        """
        says = self._opened(PREFIX, key)
        if says is None:
            raise CallRefusedError(
                401, "invalid_api_key", "the API key is not one of this run's sessions"
            )
        start, expires_s, session_id = says.decode().split(" ", 2)
        if int(expires_s) <= self._clock():
            raise CallRefusedError(
                401, "expired_api_key", f"the API key of session {session_id} has expired"
            )
        return SessionKey(session_id=session_id, start=int(start))

    def _made(self, prefix: str, says: bytes) -> str:
        sealed = self._seal(prefix, says) + says
        return prefix + base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def _opened(self, prefix: str, key: str) -> bytes | None:
        if not key.startswith(prefix) or len(key) > _LONGEST or not key.isascii():
            return None
        text = key.removeprefix(prefix)
        try:
            sealed = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        except binascii.Error:
            return None
        mac, says = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        return says if hmac.compare_digest(mac, self._seal(prefix, says)) else None

    def _seal(self, prefix: str, says: bytes) -> bytes:
        return hmac.digest(self._secret, _ENVELOPES[prefix] + says, hashlib.sha256)[:_MAC_BYTES]


def key_of(headers: Mapping[str, str], in_path: str = "") -> str:
    """The key that a request carries.

    The path wins, since its client may be made to send a key of something else; then the headers
    of OpenAI's, Anthropic's and Google's clients, in this order.

    Raises:
        CallRefusedError: 401; it carries none.
    """
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    carried = (
        in_path,
        bearer.strip() if scheme.lower() == "bearer" else "",
        headers.get("x-api-key", ""),
        headers.get("x-goog-api-key", ""),
    )
    if key := next(filter(None, carried), ""):
        return key
    raise CallRefusedError(401, "missing_api_key", "the request carries no API key")
