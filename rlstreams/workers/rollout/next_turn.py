"""Tokens between two turns of the policy: the environment's text, as the chat template has it.

A prompt given as text goes on with the environment's text as it is. Of a chat, the chat template
writes what follows an answer: the end of the assistant's message, the environment's message, the
header of the next answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlstreams.workers.engines.base import Int32s
from rlstreams.workers.gateway.template import REFUSALS, Literals, TemplateRenderer, mark_for
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.sandbox.environment import Says
from rlstreams.workers.sandbox.user_code import UserCodeError

_SHOWN = 60


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
        self._role = role
        self._vocab_size = vocab_size
        self._template = TemplateRenderer(tokenizer, eos_ids, role=role)
        self._literals = Literals(tokenizer)
        self.check_template = self._template.check_template
        """See TemplateRenderer."""

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
        except REFUSALS as err:
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
        mark = mark_for(says.content)
        return list(self._literals.encoded(self._literals.text(says.content, mark), mark))

    def _chat(self, says: Says, sampled: Sequence[int]) -> list[int]:
        messages = says.content
        if isinstance(messages, str):
            messages = [{"role": self._role, "content": messages}]
        return self._template.following(messages, sampled)


def _brief(says: Says) -> str:
    text = repr(says.content)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
