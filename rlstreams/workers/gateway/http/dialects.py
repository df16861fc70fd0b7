"""The dialects, by the names under which calls are recorded."""

from __future__ import annotations

from rlstreams.workers.gateway.http.chat import Chat
from rlstreams.workers.gateway.http.dialect import Dialect
from rlstreams.workers.gateway.http.messages import Messages
from rlstreams.workers.gateway.http.responses import Responses
from rlstreams.workers.gateway.port import CallRequest

CHAT, RESPONSES, MESSAGES = Chat(), Responses(), Messages()
_BY_NAME: dict[str, Dialect] = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}


def read_again(dialect: str, body: bytes) -> CallRequest:
    """A recorded request, as it was read when it came.

    Raises:
        CallRefusedError: it cannot be read.
        KeyError: there is no such dialect.
    """
    return _BY_NAME[dialect].asked(body, {}).calls[0]
