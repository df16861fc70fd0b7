"""The part of a request that reaches the prompt, in one spelling, by which calls are matched.

Clients write the same dialogue in several ways: JSON with another order of keys or other spaces,
`content` as null, as "" or as a list of parts, `developer` for `system`, ids of tool calls made
anew. None of this reaches the prompt, so none of it makes another request. All else does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlstreams.schemas.text import whole_text
from rlstreams.workers.gateway.port import CallRefusedError, CallRequest, Message, Parsed, Tool

CALL_ID_BYTES = 16
_TEXT_PARTS = ("text", "input_text", "output_text")
_ROLES = {"developer": "system", "function": "tool"}
ROLES = ("system", "user", "assistant", "tool")
# Made once: `json.dumps` with settings makes one for each text.
_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def plain(message: Message, field: str = "message") -> dict[str, Any]:
    """A message as templates take it: `content` is text, arguments of tools are objects.

    Raises:
        CallRefusedError: 400; a role, a part or arguments that cannot be; names `field`.
    """
    given = message.get("role")
    role = _ROLES.get(given, given) if isinstance(given, str) else None
    if role not in ROLES:
        raise _bad(f"{field}.role", f"must be one of {', '.join(ROLES)}, got {given!r}")
    made: dict[str, Any] = {"role": role, "content": text_of(message.get("content"), field)}
    if role == "assistant":
        if isinstance(thought := _thought(message), str) and thought:
            made["reasoning_content"] = whole_text(thought)
        if calls := message.get("tool_calls"):
            if not isinstance(calls, Sequence) or isinstance(calls, str):
                raise _bad(f"{field}.tool_calls", f"must be a list, got {type(calls).__name__}")
            made["tool_calls"] = [
                _tool_call(call, f"{field}.tool_calls[{n}]") for n, call in enumerate(calls)
            ]
    if role == "tool":
        made["tool_call_id"] = str(message.get("tool_call_id") or "")
    if isinstance(name := message.get("name"), str) and name:
        made["name"] = name
    return made


def _thought(message: Message) -> object:
    return message.get("reasoning_content") or message.get("reasoning")


def text_of(content: object, field: str) -> str:
    """The text of a content: null is none, parts are lines.

    Raises:
        CallRefusedError: 400; it holds what is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return whole_text(content)
    if not isinstance(content, Sequence):
        raise _bad(f"{field}.content", f"must be text or a list of parts, got {content!r:.60}")
    texts = []
    for number, part in enumerate(content):
        place = f"{field}.content[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "refusal":
            texts.append(part.get("refusal"))
        elif kind in _TEXT_PARTS:
            texts.append(part.get("text"))
        else:
            raise _bad(f"{place}.type", f"{kind!r} is not served: the model reads text alone")
        if not isinstance(texts[-1], str):
            raise _bad(f"{place}.text", f"must be text, got {texts[-1]!r:.60}")
    return whole_text("\n".join(texts))


def _tool_call(call: object, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _bad(field, f"must be a call of a function, got {call!r:.60}")
    if not isinstance(name := function.get("name"), str) or not name:
        raise _bad(f"{field}.function.name", f"must be a name, got {name!r:.60}")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": name, "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(given: object) -> object:
    """Arguments as an object, if they are one in JSON; a model's malformed text stays text."""
    if not isinstance(given, str):
        return {} if given is None else _whole(given)
    try:
        parsed = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return whole_text(given)
    return _whole(parsed) if isinstance(parsed, dict) else whole_text(given)


def _whole(value: object) -> object:
    """The same with `whole_text` of each text."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def plain_tool(tool: Tool, field: str = "tool") -> dict[str, Any]:
    """A tool's declaration with the fields that templates show.

    Raises:
        CallRefusedError: 400; it is no function with a name.
    """
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise _bad(f"{field}.type", f"{kind!r:.60} is not served: declare a function")
    if not isinstance(name := function.get("name"), str) or not name:
        raise _bad(f"{field}.function.name", f"must be a name, got {name!r:.60}")
    shown = ("name", "description", "parameters")
    return {
        "type": "function",
        "function": {k: _whole(function[k]) for k in shown if function.get(k) is not None},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelled:
    """Messages in the one spelling."""

    messages: tuple[Message, ...] = ()  # as they came
    tools: tuple[Tool, ...] = ()
    texts: tuple[bytes, ...] = ()  # JSON of each message
    tools_text: bytes = b"[]"
    chain: tuple[bytes, ...] = ()
    """A digest of each beginning of the dialogue: of its first 0, 1, ... and of all its messages.

    Two beginnings with one digest say the same, with the same tools. An answer's reasoning and the
    spaces around its text are left out: agents may send back neither, and of a call that is found
    the recorded tokens are used, not the text.
    """
    numbers: Mapping[str, str] = field(default_factory=dict)  # by id of a tool call
    num_tool_calls: int = 0

    def begins(self, messages: tuple[Message, ...], tools_text: bytes) -> bool:
        """Whether a request goes on from these messages, with these tools."""
        return (
            len(messages) >= len(self.messages)
            and tools_text == self.tools_text
            and all(map(_is_same, self.messages, messages))
        )


def _is_same(one: Message, other: Message) -> bool:
    """Whether two messages are spelled alike; Python's own equality takes 1 for true."""
    if one is other:
        return True
    return one == other and ("tool_calls" not in one or _json(one) == _json(other))


class Matcher:
    """Distinguishes the requests of a session, and finds the call that one of them continues."""

    def __init__(self, ignored: Sequence[str] = ()) -> None:
        """
        Args:
            ignored: regular expressions: their matches in texts that are no answer, a date for
                example, make no difference. By default all text counts.
        """
        self._ignored = tuple(map(re.compile, ignored))

    def request_hash(self, request: CallRequest, spelled: Spelled | None = None) -> str:
        """SHA-256 of the canonical request, hexadecimal, without parameters that the run overrules.

        Args:
            spelled: of its messages and tools; None: they are not spelled yet.

        Raises:
            CallRefusedError: 400; as `plain`.
        """
        spelled = spelled or self.spelled(request.messages, request.tools)
        limits = {
            "choice": request.choice,
            "constrained": request.constrained,
            **({} if request.is_trained else {"is_trained": False}),
            "max_tokens": request.max_tokens,
        }
        whole = hashlib.sha256(_json(limits)[:-1])  # an object, its names in order
        whole.update(b',"messages":[%b]' % b",".join(spelled.texts))
        whole.update(b',"stop":%b,"tools":%b}' % (_json(list(request.stop)), spelled.tools_text))
        return whole.hexdigest()

    def spelled(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        before: Spelled | None = None,
    ) -> Spelled:
        """Messages in one spelling; a tool call is called by its number in the dialogue.

        Args:
            before: of an earlier request: where this one begins with all of its messages and has
                its tools, only the new ones are spelled.

        Raises:
            CallRefusedError: 400; as `plain`.
        """
        messages, tools = tuple(messages), tuple(tools)
        tools_text = _json([plain_tool(tool) for tool in tools])
        if before is None or not before.begins(messages, tools_text):
            before = Spelled(chain=(hashlib.sha256(tools_text).digest(),))
        texts, chain = [*before.texts], [*before.chain]
        numbers, count = {**before.numbers}, before.num_tool_calls
        for index in range(len(texts), len(messages)):
            made = plain(messages[index], f"messages[{index}]")
            if made["role"] != "assistant":
                for pattern in self._ignored:
                    made["content"] = pattern.sub("", made["content"])
            for call in made.get("tool_calls", ()):
                numbers[call["id"]] = call["id"] = f"#{count}"
                count += 1
            if made["role"] == "tool":
                made["tool_call_id"] = numbers.get(made["tool_call_id"], made["tool_call_id"])
            texts.append(_json(made))
            chain.append(hashlib.sha256(chain[-1] + _loosely(made, texts[-1])).digest())
        return Spelled(
            messages=messages,
            tools=tools,
            texts=tuple(texts),
            tools_text=tools_text,
            chain=tuple(chain),
            numbers=numbers,
            num_tool_calls=count,
        )


def _loosely(made: dict[str, Any], text: bytes) -> bytes:
    """A message in the form that later requests are compared in: see `Spelled.chain`."""
    if made["role"] != "assistant":
        return text
    return _json(
        {k: v for k, v in made.items() if k != "reasoning_content"}
        | {"content": made["content"].strip()}
    )


def call_id(session_id: str, request_hash: str, occurrence: int) -> str:
    """The id of a call: the same in every start of the agent; hexadecimal."""
    named = f"{session_id}\n{request_hash}\n{occurrence}".encode()
    return hashlib.sha256(named).digest()[:CALL_ID_BYTES].hex()


def answer_message(parsed: Parsed) -> dict[str, Any]:
    """An answer as the message that an agent sends back with its next request."""
    made: dict[str, Any] = {"role": "assistant", "content": parsed.content or None}
    if parsed.reasoning:
        made["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.tool_calls
        ]
    else:
        made["content"] = parsed.content
    return made


def _json(value: object) -> bytes:
    """JSON in one spelling. Half of a surrogate pair is text for JSON, and none for UTF-8."""
    return _CANONICAL.encode(value).encode("utf-8", "surrogatepass")


def _bad(field: str, why: str) -> CallRefusedError:
    return CallRefusedError(400, "invalid_value", f"{field} {why}", param=field)
