"""Messages by the library `renderers`: exact continuation and parsing, for families that it knows.

A model's family is not read from its name. The library's renderings of a few dialogues are compared
with those of the folder's own chat template: the family is the one that agrees in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, get_args

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.gateway.canonical import plain, plain_tool
from rlstreams.workers.gateway.parsing import made_call
from rlstreams.workers.gateway.port import (
    CallRefusedError,
    Message,
    Parsed,
    Renderer,
    Tool,
    ToolCall,
)
from rlstreams.workers.gateway.template import Literals, mark_for
from rlstreams.workers.model.tokenizer import Tokenizer

_SKIPPED = ("default", "custom", "auto", "gpt-oss")  # the last one fetches its vocabulary
# Errors that a family's renderer raises for messages that it does not take.
_RAISED = (ValueError, TypeError, LookupError, AssertionError, AttributeError)
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "One."}]
_CALLED: list[dict[str, Any]] = [
    *_ASKED,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 1}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "1"},
]
_THOUGHT: list[dict[str, Any]] = [
    *_ASKED,
    {"role": "assistant", "content": "Three.", "reasoning_content": "Four"},
    *_ASKED,
]
_PROBES: tuple[tuple[Sequence[Message], Sequence[Tool]], ...] = (
    (_ASKED, ()),
    ([{"role": "system", "content": "Two."}, *_ASKED], ()),
    ([*_ASKED, {"role": "assistant", "content": "Three."}, *_ASKED], ()),
    (_THOUGHT, ()),
    (_ASKED, (_TOOL,)),
    ([{"role": "system", "content": "Two."}, *_CALLED], (_TOOL,)),
    ([*_CALLED, {"role": "assistant", "content": "Five."}, *_THOUGHT], (_TOOL,)),
)


def families() -> dict[str, Any]:
    """The library's families, and the class of each one's settings."""
    from renderers.configs import RendererConfig

    union = get_args(RendererConfig)[0]
    classes = {c.model_fields["name"].default: c for c in get_args(union)}
    return {name: made for name, made in classes.items() if name not in _SKIPPED}


def of_family(
    tokenizer: Tokenizer,
    family: str,
    stop_ids: frozenset[int] = frozenset(),
    *,
    options: Mapping[str, Any] | None = None,
    keeps_thoughts: bool = False,
) -> LibraryRenderer:
    """The library's renderer of a family.

    Args:
        options: variables of the template, such as `enable_thinking`.
        keeps_thoughts: an answer's reasoning stays when a user speaks again, where the template
            would take it out: then such a dialogue continues, too.

    Raises:
        ConfigError: the tokenizer is of another family, or an option is not of this one.
    """
    from renderers.base import create_renderer, merge_chat_template_kwargs

    if family not in (known := families()):
        raise ConfigError(f"there is no renderer {family!r}; there are {', '.join(known)}")
    adapter = _Adapter(tokenizer)
    retention = {"thinking_retention": "all"} if keeps_thoughts else {}
    try:
        config = merge_chat_template_kwargs(known[family](**retention), options)
        made = create_renderer(adapter, config)
    except _RAISED as err:
        raise ConfigError(f"the tokenizer is not fit for renderer {family!r}: {err}") from err
    return LibraryRenderer(made, adapter, family, stop_ids)


def found_family(
    tokenizer: Tokenizer,
    reference: Renderer,
    stop_ids: frozenset[int] = frozenset(),
    *,
    options: Mapping[str, Any] | None = None,
) -> LibraryRenderer | None:
    """The library's renderer that writes what `reference`, the chat template, writes.

    None: none does, or the template cannot take a dialogue with tools.
    """
    try:
        wanted = [reference.render(messages, tools) for messages, tools in _PROBES]
    except CallRefusedError:
        return None
    for family in families():
        try:
            found = of_family(tokenizer, family, stop_ids, options=options)
            if [found.render(messages, tools) for messages, tools in _PROBES] == wanted:
                return found
        except (ConfigError, CallRefusedError):
            continue
    return None


class LibraryRenderer:
    """A `Renderer` over one of the library's."""

    def __init__(
        self,
        renderer: Any,  # noqa: ANN401
        adapter: _Adapter,
        family: str,
        stop_ids: frozenset[int],
    ) -> None:
        self._renderer = renderer
        self._adapter = adapter
        self.stop_ids = stop_ids | frozenset(renderer.get_stop_token_ids())
        thoughts = getattr(renderer, "effective_thinking_retention", "")
        self.name = f"renderers {version('renderers')} {family} {thoughts}".rstrip()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """See Renderer."""
        dialogue, shown = self._given(messages, tools)
        try:
            made = self._renderer.render(dialogue, tools=shown, add_generation_prompt=True)
        except _RAISED as err:
            raise CallRefusedError(
                400, "invalid_messages", f"messages: {err}", param="messages"
            ) from err
        return list(made.token_ids)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> list[int] | None:
        """See Renderer."""
        dialogue, shown = self._given(new_messages, tools)
        before = [*prompt_ids, *sampled_ids]
        try:
            made = self._renderer.bridge_to_next_turn(
                list(prompt_ids), list(sampled_ids), dialogue, tools=shown
            )
        except _RAISED:
            return None
        if made is None or list(made.token_ids[: len(before)]) != before:
            return None
        return list(made.token_ids[len(before) :])

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Tool] = (),
        *,
        prompt_ids: Sequence[int] = (),
        call_id: str = "",
    ) -> Parsed:
        """See Renderer."""
        shown = [plain_tool(tool) for tool in tools]
        said = self._renderer.parse_response(
            list(sampled_ids), tools=shown or None, prompt_ids=list(prompt_ids)
        )
        names = {tool["function"]["name"] for tool in shown}
        calls: list[ToolCall] = []
        texts = [said.content or ""]
        for attempt in said.tool_calls:
            is_named = attempt.status == "ok" and attempt.name in names
            if is_named and isinstance(attempt.arguments, dict):
                calls.append(made_call(call_id, len(calls), attempt.name, attempt.arguments))
            else:
                texts.append(attempt.raw)
        return Parsed(
            content="\n".join(filter(None, texts)),
            reasoning=said.reasoning_content or "",
            tool_calls=tuple(calls),
        )

    def _given(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as the library takes them, foreign control tokens hidden."""
        dialogue = [plain(message, f"messages[{n}]") for n, message in enumerate(messages)]
        shown = [plain_tool(tool, f"tools[{n}]") for n, tool in enumerate(tools)]
        hidden, shown = self._adapter.hidden(dialogue, shown)
        return hidden, shown or None


class _Adapter:
    """Our tokenizer in the library's interface; encodes texts that `hidden` has hidden."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._literals = Literals(tokenizer)
        self._mark = ""
        self.name_or_path = ""
        self.unk_token_id: int | None = None
        self.eos_token_id = tokenizer.eos_id

    def hidden(
        self, dialogue: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Both with their control tokens behind marks, until the next ones."""
        mark = self._mark = mark_for([dialogue, tools])
        messages = [self._literals.hidden(message, mark) for message in dialogue]
        return messages, self._literals.all(list(tools), mark)

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        """Ids of a text, or of a part of one."""
        return list(self._literals.encoded(text, self._mark or "\ue000"))

    def decode(self, token_ids: Any, *_: object, **options: object) -> str:  # noqa: ANN401
        """The text of ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        skips = bool(options.get("skip_special_tokens", False))
        return self._tokenizer.decode(ids, skip_special_tokens=skips)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:  # noqa: ANN401
        """The id of a token, or of each."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]
