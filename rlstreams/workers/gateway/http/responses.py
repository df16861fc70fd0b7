"""OpenAI's responses, translated onto chat completions and back. Nothing is kept between requests:
a client sends its whole input, as it must where it stores nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlstreams.workers.gateway.canonical import plain, plain_tool
from rlstreams.workers.gateway.http.chat import Chat
from rlstreams.workers.gateway.http.dialect import ParsedRequest, event
from rlstreams.workers.gateway.http.wire import Body, bad, said_by
from rlstreams.workers.gateway.port import CallAnswer, CallRefusedError, CallRequest, Message, Tool

_SAMPLING = ("temperature", "top_p", "reasoning", "verbosity", "service_tier")
_KEPT = (
    "previous_response_id",
    "conversation",
    "prompt",
    "background",
)  # needs what we do not keep
_ECHOED = (
    "instructions", "metadata", "parallel_tool_calls", "temperature", "top_p", "tool_choice",
    "tools", "max_output_tokens", "reasoning", "text", "truncation", "user", "store",
)  # fmt: skip
_SAID = ("function_call", "reasoning")


class Responses:
    """The dialect."""

    keepalive = Chat.keepalive

    def asked(self, data: bytes, headers: Mapping[str, str]) -> ParsedRequest:
        """See Dialect."""
        body = Body(data)
        for name in _KEPT:
            if body.values.get(name):
                raise bad(name, "is not served: send the whole input", "unsupported_parameter")
        tools, constrained = _tools(body)
        call = CallRequest(
            dialect="responses",
            body=data,
            messages=_messages(body),
            tools=tools,
            max_tokens=body.integer("max_output_tokens", 1),
            requested=body.requested(_SAMPLING),
            constrained=constrained or _constraint(body),
            model=body.text("model"),
            **said_by(headers),
        )
        return ParsedRequest(calls=(call,), is_stream=body.flag("stream"), body=body)

    def answer(
        self, asked: ParsedRequest, answers: Sequence[CallAnswer], model: str
    ) -> dict[str, Any]:
        """See Dialect."""
        [answer] = answers
        is_cut = answer.finish_reason == "length"
        return {
            **_head(asked, answer, model),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _items(answer),
            "usage": _usage(answer),
        }

    def events(
        self, asked: ParsedRequest, answers: Sequence[CallAnswer], model: str
    ) -> Iterator[bytes]:
        """See Dialect."""
        [answer] = answers
        begun = {**_head(asked, answer, model), "status": "in_progress", "output": [],
                 "incomplete_details": None, "usage": None}  # fmt: skip
        whole = self.answer(asked, answers, model)
        listed: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(whole["output"]):
            listed += _item_events(index, item)
        listed.append({"type": f"response.{whole['status']}", "response": whole})
        for number, value in enumerate(listed):
            yield event({**value, "sequence_number": number}, value["type"])

    def error(self, refused: CallRefusedError) -> dict[str, Any]:
        """See Dialect."""
        return Chat().error(refused)

    def failed(self, refused: CallRefusedError) -> bytes:
        """See Dialect."""
        error = {"type": "error", "code": refused.code, "message": str(refused),
                "param": refused.param or None, "sequence_number": 0}  # fmt: skip
        return event(error, "error")


def _tools(body: Body) -> tuple[tuple[Tool, ...], str]:
    """The tools that the prompt shows, and "tool_choice" if a certain one must be called."""
    choice = body.values.get("tool_choice", "auto")
    tools = []
    for number, tool in enumerate(body.objects("tools")):
        field = f"tools[{number}]"
        if tool.get("type") != "function":
            raise bad(
                f"{field}.type", f"{tool.get('type')!r:.60} is not served: declare a function"
            )
        tools.append(plain_tool({"type": "function", "function": tool}, field))
    if choice == "none" or not tools:
        return (), ""
    is_free = choice == "auto" or body.wants_some_tool
    return tuple(tools), "" if is_free else "tool_choice"


def _constraint(body: Body) -> str:
    form = body.mapping("text").get("format") or {}
    kind = form.get("type", "text") if isinstance(form, Mapping) else form
    return "" if kind == "text" else "response_format"


def _messages(body: Body) -> tuple[Message, ...]:
    """The input as chat completions write it."""
    messages: list[dict[str, Any]] = []
    if instructions := body.text("instructions"):
        messages.append({"role": "system", "content": instructions})
    given = body.values.get("input")
    items = (
        [{"role": "user", "content": given}] if isinstance(given, str) else body.objects("input")
    )
    if not items:
        raise bad("input", "must hold an item", "missing_required_parameter")
    is_open = False  # the last message is an answer that the next item may be a part of
    for number, item in enumerate(items):
        field, kind = f"input[{number}]", item.get("type", "message")
        is_said = kind in _SAID or (kind == "message" and item.get("role") == "assistant")
        if is_said:
            made = _said(item, kind, field)
            if is_open and _is_part(messages[-1], made):
                messages[-1] = _joined(messages[-1], made)
            else:
                messages.append(made)
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id"),
                      "content": item.get("output")}  # fmt: skip
            messages.append(plain(result, field))
        elif kind == "message":
            messages.append(plain(item, field))
        else:
            raise bad(f"{field}.type", f"{kind!r:.60} is not served")
        is_open = is_said
    return tuple(plain(message) for message in messages)


def _said(item: Mapping[str, Any], kind: str, field: str) -> dict[str, Any]:
    """A part of an answer that comes back."""
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return plain({"role": "assistant", "tool_calls": [call]}, field)
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = [str(part.get("text") or "") for part in parts if isinstance(part, Mapping)]
        return plain({"role": "assistant", "reasoning_content": "\n".join(texts)}, field)
    return plain(item, field)


def _is_part(message: Mapping[str, Any], made: Mapping[str, Any]) -> bool:
    """Whether `made` goes on with an answer: a thought, then its text, then its calls."""
    if "tool_calls" in made:
        return True
    return "tool_calls" not in message and not (message["content"] or "reasoning_content" in made)


def _joined(message: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    calls = [*message.get("tool_calls", ()), *made.get("tool_calls", ())]
    content = message["content"] or made["content"]
    return {**message, **made, "content": content, **({"tool_calls": calls} if calls else {})}


def _head(asked: ParsedRequest, answer: CallAnswer, model: str) -> dict[str, Any]:
    echoed = {name: asked.body.values.get(name) for name in _ECHOED}
    return {
        "id": f"resp_{answer.call_id}",
        "object": "response",
        "created_at": answer.created_s,
        "model": model,
        **echoed,
        "parallel_tool_calls": echoed["parallel_tool_calls"] is not False,
        "tool_choice": echoed["tool_choice"] or "auto",
        "tools": echoed["tools"] or [],
        "metadata": echoed["metadata"] or {},
        "previous_response_id": None,
        "error": None,
    }


def _items(answer: CallAnswer) -> list[dict[str, Any]]:
    """The output: thought, text, calls, each with an id of this call."""
    parsed, items = answer.parsed, []
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    if parsed.reasoning:
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{answer.call_id}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": parsed.reasoning}],
                "status": status,
            }
        )
    if parsed.content or not parsed.tool_calls:
        text = {"type": "output_text", "text": parsed.content, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{answer.call_id}", "role": "assistant",
                      "status": status, "content": [text]})  # fmt: skip
    for number, call in enumerate(parsed.tool_calls):
        items.append({"type": "function_call", "id": f"fc_{answer.call_id}_{number}",
                      "call_id": call.id, "name": call.name, "arguments": call.arguments,
                      "status": "completed"})  # fmt: skip
    return items


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of an item in a stream: begun, its one piece, whole."""
    at = {"output_index": index, "item_id": item["id"]}
    kind = item["type"]
    empty = {**item, "status": "in_progress"}
    empty["arguments" if kind == "function_call" else "content"] = (
        "" if kind == "function_call" else []
    )
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    if kind == "function_call":
        name, said = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{name}.delta", **at, "delta": said}
        yield {"type": f"{name}.done", **at, "arguments": said, "name": item["name"]}
    else:
        [part] = item["content"]
        name = "response.output_text" if kind == "message" else "response.reasoning_text"
        at = {**at, "content_index": 0}
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        if kind == "message":
            yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        yield {"type": f"{name}.delta", **at, "delta": part["text"], **more}
        yield {"type": f"{name}.done", **at, "text": part["text"], **more}
        if kind == "message":
            yield {"type": "response.content_part.done", **at, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _usage(answer: CallAnswer) -> dict[str, Any]:
    output = len(answer.tokens)
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + output,
    }
