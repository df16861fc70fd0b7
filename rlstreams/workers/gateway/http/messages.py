"""Anthropic's messages, translated onto chat completions and back.

A thought goes out with an opaque signature, as its clients want one, and comes back as it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlstreams.workers.gateway.canonical import plain, plain_tool
from rlstreams.workers.gateway.http.dialect import ParsedRequest, event
from rlstreams.workers.gateway.http.wire import Body, bad, said_by
from rlstreams.workers.gateway.port import CallAnswer, CallRefusedError, CallRequest, Message, Tool

_SAMPLING = ("temperature", "top_p", "top_k", "thinking", "service_tier")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "", "none": "", "any": "", "tool": "tool_choice"}


class Messages:
    """The dialect."""

    keepalive = event({"type": "ping"}, "ping")  # its clients count events alone

    def asked(self, data: bytes, headers: Mapping[str, str]) -> ParsedRequest:
        """See Dialect."""
        body = Body(data)
        messages, tools = dialogue(body)
        if body.integer("max_tokens", 1) is None:
            raise bad("max_tokens", "is missing", "missing_required_parameter")
        call = CallRequest(
            dialect="messages",
            body=data,
            messages=messages,
            tools=tools,
            max_tokens=body.integer("max_tokens", 1),
            stop=body.stops("stop_sequences"),
            requested=body.requested(_SAMPLING),
            constrained=_constraint(body),
            model=body.text("model"),
            **said_by(headers),
        )
        return ParsedRequest(calls=(call,), is_stream=body.flag("stream"), body=body)

    def answer(
        self, asked: ParsedRequest, answers: Sequence[CallAnswer], model: str
    ) -> dict[str, Any]:
        """See Dialect."""
        [answer] = answers
        return {
            **_head(answer, model),
            "content": _blocks(answer),
            "stop_reason": _stop_reason(answer),
            "stop_sequence": answer.stopped_by or None,
            "usage": _usage(answer, len(answer.tokens)),
        }

    def events(
        self, asked: ParsedRequest, answers: Sequence[CallAnswer], model: str
    ) -> Iterator[bytes]:
        """See Dialect."""
        [answer] = answers
        begun = {
            **_head(answer, model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(answer, 0),
        }
        yield event({"type": "message_start", "message": begun}, "message_start")
        for index, block in enumerate(_blocks(answer)):
            empty, deltas = _pieces(block)
            at = {"index": index}
            begin = {"type": "content_block_start", **at, "content_block": empty}
            yield event(begin, "content_block_start")
            for delta in deltas:
                yield event(
                    {"type": "content_block_delta", **at, "delta": delta}, "content_block_delta"
                )
            yield event({"type": "content_block_stop", **at}, "content_block_stop")
        ended = {
            "type": "message_delta",
            "delta": {
                "stop_reason": _stop_reason(answer),
                "stop_sequence": answer.stopped_by or None,
            },
            "usage": _usage(answer, len(answer.tokens)),
        }
        yield event(ended, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def error(self, refused: CallRefusedError) -> dict[str, Any]:
        """See Dialect."""
        kind = "api_error" if refused.status >= 500 else "invalid_request_error"
        error = {"type": _TYPES.get(refused.status, kind), "message": str(refused)}
        return {"type": "error", "error": error, "request_id": None}

    def failed(self, refused: CallRefusedError) -> bytes:
        """See Dialect."""
        return event(self.error(refused), "error")


def dialogue(body: Body) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Messages and tools of a request, as chat completions write them; raises CallRefusedError."""
    given = body.objects("messages")
    if not given:
        raise bad("messages", "must hold a message", "missing_required_parameter")
    if given[-1].get("role") == "assistant":
        raise bad(
            f"messages[{len(given) - 1}].role",
            "is the assistant's, and no answer goes on with a text that it did not sample",
            "unsupported_value",
        )
    messages: list[Message] = []
    if system := body.values.get("system"):
        messages.append(plain({"role": "system", "content": system}, "system"))
    for number, message in enumerate(given):
        messages += _translated(message, f"messages[{number}]")
    if body.mapping("tool_choice").get("type") == "none":
        return tuple(messages), ()
    tools = tuple(_tool(t, f"tools[{n}]") for n, t in enumerate(body.objects("tools")))
    return tuple(messages), tools


def _constraint(body: Body) -> str:
    kind = body.mapping("tool_choice").get("type", "auto")
    if kind not in _CHOICES:
        raise bad("tool_choice.type", f"must be one of {', '.join(_CHOICES)}, got {kind!r:.60}")
    if body.values.get("output_format") or body.mapping("output_config").get("format"):
        return "response_format"
    return _CHOICES[kind]


def _tool(tool: Mapping[str, Any], field: str) -> Tool:
    if (kind := tool.get("type", "custom")) not in ("custom", None):
        raise bad(f"{field}.type", f"{kind!r:.60} is not served: declare a tool of your own")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return plain_tool({"type": "function", "function": function}, field)


def _translated(message: Mapping[str, Any], field: str) -> Iterator[Message]:
    """A message's blocks in their order: each result of a tool is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad(f"{field}.role", f"must be user or assistant, got {role!r:.60}")
    if not isinstance(content, list):
        yield plain({"role": role, "content": content}, field)
    elif role == "assistant":
        yield _said(content, field)
    else:
        texts: list[object] = []
        for number, block in enumerate(content):
            if not isinstance(block, Mapping) or block.get("type") != "tool_result":
                texts.append(block)
                continue
            if texts:
                yield plain({"role": role, "content": texts}, field)
                texts = []
            place = f"{field}.content[{number}]"
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id"),
                      "content": block.get("content")}  # fmt: skip
            yield plain(result, place)
        if texts:
            yield plain({"role": role, "content": texts}, field)


def _said(blocks: Sequence[Any], field: str) -> Message:
    """An answer that comes back."""
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(block)
    made = {"role": "assistant", "content": texts, "tool_calls": calls}
    return plain({**made, "reasoning_content": "\n".join(thoughts)}, field)


def _head(answer: CallAnswer, model: str) -> dict[str, Any]:
    return {"id": f"msg_{answer.call_id}", "type": "message", "role": "assistant", "model": model}


def _blocks(answer: CallAnswer) -> list[dict[str, Any]]:
    """The content of an answer; never none, which clients ask for again."""
    parsed = answer.parsed
    blocks: list[dict[str, Any]] = []
    if parsed.reasoning:
        signature = hashlib.sha256(answer.call_id.encode()).hexdigest()
        blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": signature})
    if parsed.content or not parsed.tool_calls:
        blocks.append({"type": "text", "text": parsed.content, "citations": None})
    for call in parsed.tool_calls:
        arguments = json.loads(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _pieces(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as a stream begins it, and the deltas that complete it."""
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if block["type"] == "tool_use":
        text = json.dumps(block["input"])
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _stop_reason(answer: CallAnswer) -> str:
    return "stop_sequence" if answer.stopped_by else _STOPS[answer.finish_reason]


def _usage(answer: CallAnswer, output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
