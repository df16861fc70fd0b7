"""A session's key: what an agent gives as its API key, and all that a gateway needs to know of it.

A key is the session's id, its start and when it expires, sealed by HMAC-SHA-256 with the run's
secret. So a gateway that forgot everything, or another one of the run, knows the session. A key is
a capability: whoever has it may call the model as that session. It is never logged; `shown` is.
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

PREFIX = "rls-"
_MAC_BYTES = 16
_LONGEST = 1024  # characters of a key
_ENVELOPE = b"rlstreams session key 1\n"  # what the run's secret seals elsewhere is no key


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKey:
    """What a key says."""

    session_id: str
    start: int  # of its agent, from 0
    expires_s: int  # Unix time, in seconds


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
        """The key of one start of a session's agent; of letters, digits, `-` and `_` alone."""
        says = f"{start} {expires_s} {session_id}".encode()
        return PREFIX + base64.urlsafe_b64encode(self._seal(says) + says).rstrip(b"=").decode()

    def read(self, key: str) -> SessionKey:
        """What `key` says.

        Raises:
            CallRefusedError: 401; there is none, this run did not make it, or it has expired.
        """
        says = self._opened(key)
        if says is None:
            raise CallRefusedError(
                401, "invalid_api_key", "the API key is not one of this run's sessions"
            )
        start, expires_s, session_id = says.decode().split(" ", 2)
        if int(expires_s) <= self._clock():
            raise CallRefusedError(
                401, "expired_api_key", f"the API key of session {session_id} has expired"
            )
        return SessionKey(session_id=session_id, start=int(start), expires_s=int(expires_s))

    def _opened(self, key: str) -> bytes | None:
        if not key.startswith(PREFIX) or len(key) > _LONGEST or not key.isascii():
            return None
        text = key.removeprefix(PREFIX)
        try:
            sealed = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        except binascii.Error:
            return None
        mac, says = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        return says if hmac.compare_digest(mac, self._seal(says)) else None

    def _seal(self, says: bytes) -> bytes:
        return hmac.digest(self._secret, _ENVELOPE + says, hashlib.sha256)[:_MAC_BYTES]


def shown(key: str) -> str:
    """What a log may say of a key: the same for the same one, and no way back to it."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:8]


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
