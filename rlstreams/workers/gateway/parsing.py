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
    problems: list[str] = []
    rest, at = "", 0
    for found in _CALL.finditer(said) if tools else ():
        call = _read(found[1], is_closed=bool(found[2]), names=names)
        if isinstance(call, str):
            problems.append(call)
            continue
        rest, at = rest + said[at : found.start()], found.end()
        calls.append(made_call(call_id, len(calls), *call))
    return Parsed(
        content=(rest + said[at:]).strip(),
        reasoning=thought.strip(),
        tool_calls=tuple(calls),
        problem="; ".join(problems),
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


def _read(block: str, *, is_closed: bool, names: set[str]) -> tuple[str, object] | str:
    """Name and arguments; or why it is no call."""
    if not is_closed:
        return "<tool_call> is not closed"
    try:
        value = json.loads(block)
    except (ValueError, RecursionError) as err:
        return f"<tool_call> holds no JSON: {err}"
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return "<tool_call> has no name"
    if name not in names:
        return f"there is no tool {name!r}"
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return f"arguments of {name} are no object"
    return name, arguments
