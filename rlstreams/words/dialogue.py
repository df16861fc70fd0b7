"""Request and answer of an agent's call in words, read from its record in the call's dialect.

Where a request cannot be read, a foreign writer's for example, its new tokens are shown as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlstreams.schemas.events import CallCommitted, Tensor, TensorError
from rlstreams.streams.sessions.chain import unpacked
from rlstreams.streams.sessions.figures import Said, Spoken, Words
from rlstreams.words.spelling import Spelling
from rlstreams.workers.gateway.canonical import plain
from rlstreams.workers.gateway.http.chat import Chat
from rlstreams.workers.gateway.http.dialect import Dialect
from rlstreams.workers.gateway.http.messages import Messages
from rlstreams.workers.gateway.http.responses import Responses
from rlstreams.workers.gateway.port import CallRefusedError, Message

_DIALECTS: Mapping[str, Dialect] = {
    "chat": Chat(),
    "responses": Responses(),
    "messages": Messages(),
}
PROMPT = "prompt"  # the role where only tokens are known


def words_of(spelling: Spelling) -> Words:
    """Return a function from call to words; the run's tokenizer spells what no message holds."""

    def words(call: CallCommitted) -> Spoken:
        asked = _asked(call)
        said = (segment.token_ids for segment in call.segments)
        answer = _answer(call) or Said(role="assistant", text=_tokens(said, spelling))
        if asked is None:
            new = Said(role=PROMPT, text=_tokens([call.new_ids], spelling))
            return Spoken(asked=(new,), answer=answer, is_rest=True)
        return Spoken(asked=asked, answer=answer)

    return words


def _asked(call: CallCommitted) -> tuple[Said, ...] | None:
    dialect = _DIALECTS.get(call.dialect)
    if dialect is None:
        return None
    try:
        read = dialect.asked(unpacked(call.request), {})
    except (CallRefusedError, ValueError):
        return None
    return tuple(_said(message) for message in read.calls[0].messages)


def _answer(call: CallCommitted) -> Said | None:
    try:
        return _said(plain(json.loads(unpacked(call.response))))
    except (CallRefusedError, ValueError, AttributeError, RecursionError):
        return None


def _said(message: Message) -> Said:
    return Said(
        role=str(message["role"]),
        text=str(message["content"]),
        thought=str(message.get("reasoning_content", "")),
        tools=tuple(_tools(message.get("tool_calls", ()))),
    )


def _tools(calls: Any) -> Iterator[str]:  # noqa: ANN401
    for call in calls:
        function = call["function"]
        given = function["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        yield f"{function['name']}({text})"


def _tokens(parts: Iterable[Tensor], spelling: Spelling) -> str:
    try:
        ids = [int(token) for part in parts for token in part.numpy()]
    except TensorError as err:
        return f"tokens that cannot be read: {err}"
    return spelling.plain(ids)
