"""Parses answers of families that no library knows: `<think>` and `<tool_call>` in JSON.

This is the form of Hermes, Qwen and most models that were trained from them:
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rlstreams.workers.gateway.port import Parsed, Tool, ToolCall

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_OPEN_THOUGHT = re.compile(r"\s*<think>")
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


def parse_text(
    text: str, tools: Sequence[Tool] = (), *, is_opened: bool = False, call_id: str = ""
) -> Parsed:
    """Parse an answer; text that is no call of one of `tools` stays content, word for word.

    Args:
        is_opened: the prompt has begun a thought.
    """
    thought, said = _split_thought(f"<think>{text}" if is_opened else text)
    names = {tool["function"]["name"] for tool in tools}
    calls: list[ToolCall] = []
    rest, at = "", 0
    for found in _CALL.finditer(said) if tools else ():
        call = _read(found[1], names) if found[2] else None
        if call is not None:
            rest, at = rest + said[at : found.start()], found.end()
            calls.append(made_call(call_id, len(calls), *call))
    return Parsed(
        content=(rest + said[at:]).strip(),
        reasoning=thought.strip(),
        tool_calls=tuple(calls),
    )


def made_call(call_id: str, number: int, name: str, arguments: Any) -> ToolCall:  # noqa: ANN401
    """A call of a tool, the `number`-th of an answer; a replay of the answer gives the same id."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=f"call_{call_id}_{number}", name=name, arguments=text)


def _split_thought(text: str) -> tuple[str, str]:
    if found := _THOUGHT.match(text):
        return found[1], text[found.end() :]
    if found := _OPEN_THOUGHT.match(text):  # cut while it thought
        return text[found.end() :], ""
    return "", text


def _read(block: str, names: set[str]) -> tuple[str, object] | None:
    """Name and arguments; None: it is no call of one of these tools."""
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", {})
    return (name, arguments) if isinstance(arguments, dict) else None
