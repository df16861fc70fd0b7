"""Messages by a model's own chat template: a whole dialogue, and what follows an answer in it.

The text after an answer is the difference of two renderings, which holds only if the template
renders earlier messages as it did before: `check_template` tries it. The policy's own tokens
are never rendered or tokenised again. Where it has sampled the token that ends its message, the
template's own is left out. A foreign text that looks like a control token is encoded as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.gateway.canonical import plain, plain_tool
from rlstreams.workers.gateway.parsing import parse_text
from rlstreams.workers.gateway.port import CallRefusedError, Message, Parsed, Tool
from rlstreams.workers.model.tokenizer import Tokenizer

_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "QUESTION"}]
_ASKED_AGAIN: list[dict[str, Any]] = [
    *_ASKED,
    {"role": "assistant", "content": "EARLIER"},
    {"role": "user", "content": "AGAIN"},
]
_ANSWER = "ANSWER"
_WORD = "OBSERVED <\u00e4>"  # characters that a template for HTML or ASCII would change
_THOUGHT = "<think>\nTHOUGHT\n</think>\n\nANSWER"
_OPENED = "<think>\n"  # some templates begin the next answer so
_MARKS = range(0xE000, 0xF8FF)  # characters for private use
_SHOWN = 60
# Tags that templates look for in the policy's answers.
_OF_ANSWERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_TAIL = 8  # tokens of a prompt in which a thought may have been begun
# Errors of a template (or the tokenizer, of text that is not Unicode) for one sample's messages.
REFUSALS = (ConfigError, ValueError, TypeError, LookupError, AttributeError)


class TemplateRenderer:
    """A `Renderer` for any family whose folder has a chat template."""

    def __init__(
        self, tokenizer: Tokenizer, stop_ids: frozenset[int] = frozenset(), *, role: str = "tool"
    ) -> None:
        """
        Args:
            stop_ids: tokens that end an answer of the model; a template writes one of them.
            role: of most messages between two answers.
        """
        self._tokenizer = tokenizer
        self._role = role
        end = tokenizer.eos_id
        self.stop_ids = stop_ids if end is None else stop_ids | {end}
        self._literals = Literals(tokenizer)
        self._checked: set[tuple[str, ...]] = set()  # roles of the messages between two answers

    @property
    def name(self) -> str:
        """See Renderer."""
        return f"template 1 {self._tokenizer.template_hash[:16]}"

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """See Renderer."""
        dialogue = [plain(message, f"messages[{n}]") for n, message in enumerate(messages)]
        shown = [plain_tool(tool, f"tools[{n}]") for n, tool in enumerate(tools)]
        mark = mark_for([dialogue, shown])
        hidden = [self._literals.hidden(message, mark) for message in dialogue]
        try:
            text = self._tokenizer.apply_chat_template(hidden, self._literals.all(shown, mark))
            ids = list(self._literals.encoded(text, mark))
        except REFUSALS as err:
            raise CallRefusedError(
                400, "invalid_messages", f"messages: {err}", param="messages"
            ) from err
        begin = self._tokenizer.begin_ids
        return ids if ids[: len(begin)] == begin else [*begin, *ids]

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> list[int] | None:
        """See Renderer."""
        del prompt_ids
        messages = [plain(message, f"messages[{n}]") for n, message in enumerate(new_messages)]
        if not messages or any(message["role"] == "assistant" for message in messages):
            return None
        try:
            return self.following(messages, sampled_ids, [plain_tool(tool) for tool in tools])
        except REFUSALS:
            return None

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Tool] = (),
        *,
        prompt_ids: Sequence[int] = (),
        call_id: str = "",
    ) -> Parsed:
        """See Renderer."""
        ids = list(sampled_ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        opened = self._tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False)
        return parse_text(
            text, tools, is_opened=opened.rstrip().endswith("<think>"), call_id=call_id
        )

    def check_template(self, roles: tuple[str, ...] = ()) -> None:
        """Return if later turns of a chat can be rendered by the template.

        Args:
            roles: of the environment's messages; none: one, of the role that a text is given.

        Raises:
            ConfigError: it renders what was said before in another way, or the environment's text
                in another way than as it is; names it.
            TokenizerError: there is none, or it refuses the messages.
        """
        roles = roles or (self._role,)
        if roles in self._checked:
            return
        found: set[str] = set()
        hidden = f"{_WORD}{chr(_MARKS[0])}{_digits('<eos>')}{chr(_MARKS[0])}"
        observed: list[Message] = [{"role": role, "content": hidden} for role in roles]
        for history in (_ASKED, _ASKED_AGAIN):
            for said in (_ANSWER, _THOUGHT):
                found.add(self._following(history, said, observed))
                later = [*history, {"role": "assistant", "content": said}, *observed]
                found.add(self._following(later, said, observed))
        if len(found) > 1:
            one, other = sorted(found)[:2]
            raise self._unstable(f"what follows an answer depends on it: {one!r} or {other!r}")
        if found.pop().count(hidden) < len(roles):
            raise ConfigError(
                f"the chat template {self._tokenizer.template_name} cannot be used for several "
                f"turns: it does not write the text of a message of role {roles[0]!r} as it is; "
                "try another environment.role, or another template in data.template"
            )
        self._checked.add(roles)

    def following(
        self, messages: Sequence[Message], sampled: Sequence[int], tools: Sequence[Tool] = ()
    ) -> list[int]:
        """The tokens that follow `sampled`, up to the next answer.

        Raises:
            ConfigError: the template is not fit for several turns of these roles.
        """
        # Other roles than the configured one are this sample's doing, and its fault alone.
        self.check_template(tuple(message["role"] for message in messages))
        mark = mark_for(messages)
        hidden = [self._literals.hidden(message, mark) for message in messages]
        text = self._following(_ASKED, _ANSWER, hidden, tools)
        ids = list(self._literals.encoded(text, mark))
        return ids[1:] if ids and self._has_ended(sampled, ids[0]) else ids

    def _has_ended(self, sampled: Sequence[int], end: int) -> bool:
        """Whether the turn holds its end; a call of a tool may have another than an answer."""
        ends = self.stop_ids if end in self.stop_ids else {end}
        return len(sampled) > 0 and sampled[-1] in ends

    def _following(
        self,
        history: Sequence[Message],
        said: str,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> str:
        """The text that the template renders after an answer: `messages` and the next header.

        Raises:
            ConfigError: what stands before is rendered in another way with `messages` behind it.
        """
        render = self._tokenizer.apply_chat_template
        head = render(history, tools)
        # A thought that the template has begun already is not begun again.
        written = said.removeprefix(_OPENED) if head.endswith(_OPENED) else said
        before = head + written
        whole = render([*history, {"role": "assistant", "content": said}, *messages], tools)
        if not whole.startswith(before):
            at = next(
                (n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b),
                len(whole),
            )
            raise self._unstable(
                f"...{before[max(0, at - 20) : at + _SHOWN]!r} becomes "
                f"...{whole[max(0, at - 20) : at + _SHOWN]!r} once a message of role "
                f"{messages[0]['role']!r} follows"
            )
        return whole[len(before) :]

    def _unstable(self, why: str) -> ConfigError:
        return ConfigError(
            f"the chat template {self._tokenizer.template_name} cannot be used for several turns, "
            f"it does not keep earlier ones as they were (reasoning that it strips, for one): "
            f"{why}; try another environment.role, or name a template that keeps them in "
            "data.template"
        )


class Literals:
    """Hides texts that look like control tokens in foreign messages from their renderer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = tokenizer.special_tokens
        self._foreign = _any_of(tokens)
        self._said = _any_of([token for token in tokens if token not in _OF_ANSWERS])

    def hidden(self, message: Message, mark: str) -> dict[str, Any]:
        """A message with such texts behind marks; the policy's own tags stay in its answers."""
        content = message["content"]
        if message["role"] == "assistant":
            return {**message, "content": _hide(self._said, content, mark)}
        return {**message, "content": _hide(self._foreign, content, mark)}

    def text(self, text: str, mark: str) -> str:
        """`text` with what looks like a control token hidden behind marks."""
        return _hide(self._foreign, text, mark)

    def all(self, value: Any, mark: str) -> Any:  # noqa: ANN401
        """Hide such texts in every text of a tool's declaration."""
        if isinstance(value, str):
            return self.text(value, mark)
        if isinstance(value, Mapping):
            return {self.all(key, mark): self.all(item, mark) for key, item in value.items()}
        return [self.all(item, mark) for item in value] if isinstance(value, list) else value

    def encoded(self, text: str, mark: str) -> Iterator[int]:
        """The tokens of a rendered text; what was hidden is encoded as plain characters."""
        for number, piece in enumerate(text.split(mark)):
            if piece and number % 2:
                yield from self._tokenizer.encode_piece(_undigits(piece), literal=True)
            elif piece:
                yield from self._tokenizer.encode_piece(piece)


def _any_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, tokens))) if tokens else None


def _hide(pattern: re.Pattern[str] | None, text: str, mark: str) -> str:
    if pattern is None:
        return text
    return pattern.sub(lambda found: f"{mark}{_digits(found[0])}{mark}", text)


def mark_for(messages: object) -> str:
    """A character that is in none of these texts."""
    text = json.dumps(messages, ensure_ascii=False)
    return next(chr(code) for code in _MARKS if chr(code) not in text)


def _digits(text: str) -> str:
    """A text that no template changes and that names no token."""
    return text.encode().hex()


def _undigits(digits: str) -> str:
    return bytes.fromhex(digits).decode()
