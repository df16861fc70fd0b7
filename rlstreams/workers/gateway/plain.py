"""Messages of a model without a chat template: their texts, one after another."""

from __future__ import annotations

from collections.abc import Sequence

from rlstreams.workers.gateway.canonical import plain
from rlstreams.workers.gateway.port import CallRefusedError, Message, Parsed, Tool
from rlstreams.workers.model.tokenizer import Tokenizer


class PlainRenderer:
    """A `Renderer`: no roles, no headers; an answer is ended by the token that ends a text.

    A text of one message makes the ids that the same text makes as a row's prompt.
    """

    name = "plain 1"

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int] = frozenset()) -> None:
        """
        Args:
            stop_ids: tokens that end an answer; the tokenizer's own end is one of them.
        """
        self._tokenizer = tokenizer
        end = tokenizer.eos_id
        self._end = [] if end is None else [end]
        self.stop_ids = stop_ids | frozenset(self._end)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """See Renderer."""
        if tools:
            raise CallRefusedError(
                400, "unsupported_parameter", "tools: the model has no chat template, so it "
                "cannot be shown a tool; name a template in data.template", param="tools",
            )  # fmt: skip
        begin = self._tokenizer.bos_id
        ids = [] if begin is None else [begin]
        for number, message in enumerate(messages):
            ids += self._text(message, f"messages[{number}]")
            if message["role"] == "assistant":
                ids += self._end
        return ids

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> list[int] | None:
        """See Renderer."""
        del prompt_ids
        if tools or any(message["role"] == "assistant" for message in new_messages):
            return None
        is_ended = len(sampled_ids) > 0 and sampled_ids[-1] in self.stop_ids
        ids = [] if is_ended else list(self._end)
        for number, message in enumerate(new_messages):
            ids += self._text(message, f"messages[{number}]")
        return ids

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Tool] = (),
        *,
        prompt_ids: Sequence[int] = (),
        call_id: str = "",
    ) -> Parsed:
        """See Renderer."""
        del tools, prompt_ids, call_id
        return Parsed(content=self._tokenizer.decode(sampled_ids))

    def _text(self, message: Message, field: str) -> list[int]:
        content: str = plain(message, field)["content"]
        return self._tokenizer.encode_piece(content, literal=True)
