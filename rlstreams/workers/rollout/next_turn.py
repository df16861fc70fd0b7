"""What stands between two turns of the policy, as tokens: the environment's text, dressed.

A prompt given as text goes on with the environment's text as it is. Of a chat, the chat template
writes what follows an answer: the end of the assistant's message, the environment's message, the
header of the next answer. That is found as a difference of two renderings, which holds only if the
template renders what was said before as it did before: `check_template` tries it.

The policy's own tokens are never rendered or tokenised again. Where it has sampled the token
that ends its message, the template's own is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.engines.base import Int32s
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.sandbox.environment import Message, Says
from rlstreams.workers.sandbox.user_code import UserCodeError

_ASKED: list[Message] = [{"role": "user", "content": "QUESTION"}]
_ASKED_AGAIN: list[Message] = [
    *_ASKED,
    {"role": "assistant", "content": "EARLIER"},
    {"role": "user", "content": "AGAIN"},
]
_ANSWER = "ANSWER"
_WORD = "OBSERVED <\u00e4>"  # what a template that writes for HTML or ASCII would change
_THOUGHT = "<think>\nTHOUGHT\n</think>\n\nANSWER"
_OPENED = "<think>\n"  # some templates begin the next answer so
_MARKS = range(0xE000, 0xF8FF)  # characters for private use
_SHOWN = 60
# What a template (or the tokenizer, of text that is not Unicode) raises for one sample's messages.
_REFUSALS = (ConfigError, ValueError, TypeError, LookupError, AttributeError)


class NextTurn:
    """Makes the tokens that follow a turn."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        role: str,
        *,
        vocab_size: int,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            role: of the message that a text becomes in a chat.
            eos_ids: tokens that end an answer of the model; a template writes one of them.
        """
        self._tokenizer = tokenizer
        self._role = role
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        specials = "|".join(map(re.escape, tokenizer.special_tokens))
        self._special = re.compile(specials) if specials else None
        self._checked: set[tuple[str, ...]] = set()  # roles of the messages between two answers

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

    def tokens(self, says: Says, sampled: Sequence[int], *, is_chat: bool) -> Int32s:
        """The tokens that follow `sampled`, up to the policy's next turn.

        Raises:
            ConfigError: a chat whose template is not fit for several turns.
            UserCodeError: an answer that is no text, that the template does not take as it should,
                that makes no token, or one outside of the vocabulary.
        """
        if is_chat:
            self.check_template()
        try:
            ids = self._chat(says, sampled) if is_chat else self._text(says)
        except _REFUSALS as err:
            raise UserCodeError(
                f"the environment's answer {_brief(says)} cannot be a turn: {err}"
            ) from err
        if not ids:
            raise UserCodeError(f"the environment's answer {_brief(says)} makes no tokens")
        if max(ids) >= self._vocab_size:
            raise UserCodeError(
                f"the environment's answer holds token {max(ids)}, and the model knows "
                f"{self._vocab_size}: the tokenizer is not the model's"
            )
        return np.array(ids, np.int32)

    def _text(self, says: Says) -> list[int]:
        if not isinstance(says.content, str):
            raise UserCodeError(
                "the environment answered with messages, and the prompt is text: return text, or "
                'set data.chat = "always"'
            )
        mark = _mark_for(says.content)
        return list(self._encoded(self._hidden(says.content, mark), mark))

    def _chat(self, says: Says, sampled: Sequence[int]) -> list[int]:
        messages = says.content
        if isinstance(messages, str):
            messages = [{"role": self._role, "content": messages}]
        # Other roles than the configured one are this sample's doing, and its fault alone.
        self.check_template(tuple(message["role"] for message in messages))
        mark = _mark_for("".join(message["content"] for message in messages))
        hidden = [{**m, "content": self._hidden(m["content"], mark)} for m in messages]
        ids = list(self._encoded(self._following(_ASKED, _ANSWER, hidden), mark))
        return ids[1:] if ids and self._has_ended(sampled, ids[0]) else ids

    def _has_ended(self, sampled: Sequence[int], end: int) -> bool:
        """Whether the turn holds its end; a call of a tool may have another than an answer."""
        ends = self._eos_ids if end in self._eos_ids else {end}
        return len(sampled) > 0 and sampled[-1] in ends

    def _following(self, history: Sequence[Message], said: str, messages: Sequence[Message]) -> str:
        """What the template renders behind an answer, for `messages` and the next answer's header.

        Raises:
            ConfigError: what stands before is rendered in another way with `messages` behind it.
        """
        render = self._tokenizer.apply_chat_template
        head = render(history)
        # A thought that the template has begun already is not begun again.
        written = said.removeprefix(_OPENED) if head.endswith(_OPENED) else said
        before = head + written
        whole = render([*history, {"role": "assistant", "content": said}, *messages])
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

    def _hidden(self, text: str, mark: str) -> str:
        """`text` with what looks like a control token hidden behind marks."""
        if self._special is None:
            return text
        return self._special.sub(lambda found: f"{mark}{_digits(found[0])}{mark}", text)

    def _encoded(self, text: str, mark: str) -> Iterator[int]:
        """The tokens of a rendered text; what was hidden is encoded as plain characters."""
        for number, piece in enumerate(text.split(mark)):
            if piece and number % 2:
                yield from self._tokenizer.encode_piece(_undigits(piece), literal=True)
            elif piece:
                yield from self._tokenizer.encode_piece(piece)


def _brief(says: Says) -> str:
    text = repr(says.content)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _mark_for(text: str) -> str:
    """A character that is not in `text`."""
    return next(chr(code) for code in _MARKS if chr(code) not in text)


def _digits(text: str) -> str:
    """A text that no template changes and that names no token."""
    return text.encode().hex()


def _undigits(digits: str) -> str:
    return bytes.fromhex(digits).decode()
