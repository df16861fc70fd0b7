"""The handshake of a link: both ends prove that they know the receiver's key, which never travels.

The key of a receiver is derived from the run's secret, so a server that is given its own key cannot
pose as another receiver. HMAC-SHA256 over both nonces and all fields of the receiver's `Hello`.
Proven, not encrypted: links belong on a private interface.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass

from . import PROTOCOL
from .errors import PullError
from .frames import Connection, Frame

NOT_OURS = (
    "the secret is not this run's: give both hosts one weights.secret (where none is configured, "
    "it is the file weights.secret in the run's folder on the trainer's host)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A receiver's description of itself."""

    receiver: str
    rank: int  # among the server's ranks
    epoch: int  # of the trainer that announced the wanted version
    purpose: str  # "member", "report", or "group/{id}" for a rendezvous


def receiver_key(secret: str, receiver: str) -> str:
    """The key (hex) of one receiver."""
    return hmac.new(secret.encode(), f"receiver {receiver}".encode(), hashlib.sha256).hexdigest()


def introduce(connection: Connection, hello: Hello, key: str, until_s: float) -> None:
    """The receiver's side.

    Raises:
        PullError: the trainer refuses, does not know the key, or is of another epoch.
    """
    challenge = connection.receive(until_s)
    if challenge.get("rlstreams") != PROTOCOL:
        raise PullError(
            "refused",
            f"{connection.peer} speaks version {challenge.get('rlstreams')} of the link, "
            f"this end {PROTOCOL}",
        )
    nonce = secrets.token_hex(16)
    said = {"hello": asdict(hello), "nonce": nonce, "challenge": str(challenge.get("nonce"))}
    connection.send(said | {"proof": _proof(key, "receiver", said)})
    answer = connection.receive(until_s)
    if answer.get("type") == "refused":
        raise PullError(str(answer.get("kind")), str(answer.get("error")))
    if not _are_equal(str(answer.get("proof")), _proof(key, "server", said)):
        raise PullError("refused", f"{connection.peer} does not know the key of {hello.receiver}")
    connection.trust()


def admit(
    connection: Connection, epoch: int, key_of: Callable[[str], str], until_s: float
) -> Hello:
    """The server's side: the receiver's proven identity.

    Raises:
        PullError: not proven, or it follows another epoch; the refusal was sent with its reason.
    """
    challenge = secrets.token_hex(16)
    connection.send({"rlstreams": PROTOCOL, "nonce": challenge})
    said = connection.receive(until_s)
    proof = str(said.pop("proof", ""))
    try:
        hello = Hello(**said["hello"])
        key = key_of(hello.receiver)
    except (KeyError, TypeError) as err:
        raise _refusal(connection, f"no hello: {err}") from err
    is_fresh = said.get("challenge") == challenge
    if not is_fresh or not _are_equal(proof, _proof(key, "receiver", said)):
        raise _refusal(connection, NOT_OURS)
    if hello.epoch != epoch:
        raise _refusal(
            connection, f"epoch {hello.epoch} announced what it wants, this trainer is {epoch}"
        )
    connection.send({"type": "admitted", "proof": _proof(key, "server", said)})
    connection.trust()
    return hello


def _proof(key: str, side: str, said: Frame) -> str:
    text = side + json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hmac.new(bytes.fromhex(key), text.encode(), hashlib.sha256).hexdigest()


def _are_equal(given: str, expected: str) -> bool:
    """Compare in constant time; as bytes, because a stranger may send any text."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def _refusal(connection: Connection, text: str) -> PullError:
    error = f"{connection.peer} refused: {text}"
    connection.send({"type": "refused", "kind": "refused", "error": error})
    return PullError("refused", error)
