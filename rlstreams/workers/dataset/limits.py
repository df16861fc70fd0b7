"""Limits of a prompt's length: rows that are left out and counted, and rows that are an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import DataSection
from rlstreams.workers.dataset.row import PromptText, RowReader

NO_LIMIT = 1 << 62
SPARE_TOKENS = 16  # special tokens that a tokenizer may add around a text


class PromptEncoder(Protocol):
    """The part of a tokenizer that issuing needs."""

    @property
    def hash(self) -> str:
        """Hash of the tokenizer's files."""

    def encode_prompt(self, prompt: PromptText) -> list[int]:
        """Token ids, special tokens included; the chat template is applied to messages.

        Raises:
            ValueError: no chat template, or it refuses the messages.
        """


class LeftOut(NamedTuple):
    """Why a row is left out."""

    why: str  # for a count of such rows
    detail: str  # the prompt's length and the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """Limits of prompts, in tokens."""

    encoder: PromptEncoder
    longest: int  # that leaves the model room for one token
    min_tokens: int
    max_tokens: int  # 0: a prompt above `longest` is an error

    @classmethod
    def of(cls, data: DataSection, encoder: PromptEncoder, longest: int | None) -> PromptLimits:
        """The limits that `[data]` sets.

        Args:
            longest: tokens that the model takes; None: unknown.
        """
        return cls(
            encoder=encoder,
            longest=longest - 1 if longest else NO_LIMIT,
            min_tokens=data.min_prompt_tokens,
            max_tokens=data.max_prompt_tokens,
        )

    @property
    def key(self) -> list[object]:
        """Values that decide which rows are left out, beside the fields of `[data]`."""
        return [self.encoder.hash, self.longest]

    def reason(self, reader: RowReader, prompt: PromptText, num_bytes: int, place: str) -> str:
        """Why a row is left out, for a count; empty: it stays.

        A token stands for at least one byte, so that text which is short enough in bytes is not
        tokenised for this.

        Args:
            num_bytes: of the row.

        Raises:
            ConfigError: as `left_out`.
        """
        dressed = reader.dressed(prompt)
        most = min(self.max_tokens or self.longest, self.longest)
        if not self.min_tokens and isinstance(dressed, str) and isinstance(prompt, str):
            spare = len(dressed.encode()) - len(prompt.encode()) if dressed != prompt else 0
            if num_bytes + spare + SPARE_TOKENS <= most:
                return ""
        found = self.left_out(len(encoded(self.encoder, dressed, place)), place)
        return found.why if found else ""

    def left_out(self, num_tokens: int, place: str) -> LeftOut | None:
        """Why a row with a prompt of so many tokens is left out; None: it stays.

        Raises:
            ConfigError: the model cannot take it, and no setting leaves such rows out.
        """
        told = f"prompt of {num_tokens} tokens"
        if num_tokens < self.min_tokens:
            return LeftOut("too short", f"{told}, data.min_prompt_tokens is {self.min_tokens}")
        if num_tokens <= min(self.max_tokens or self.longest, self.longest):
            return None
        if 0 < self.max_tokens < num_tokens:
            return LeftOut("too long", f"{told}, data.max_prompt_tokens is {self.max_tokens}")
        if self.max_tokens:
            return LeftOut("too long", f"{told}, the model takes at most {self.longest}")
        raise ConfigError(
            f"{place}: prompt of {num_tokens} tokens; the model takes at most {self.longest} so "
            "that one can follow; shorten or remove the row, or leave such rows out with "
            f"data.max_prompt_tokens = {self.longest}"
        )


def encoded(encoder: PromptEncoder, prompt: PromptText, place: str) -> list[int]:
    """The tokens of a prompt.

    Raises:
        ConfigError: the tokenizer cannot take it; names the row.
    """
    try:
        return encoder.encode_prompt(prompt)
    except ValueError as err:  # a tokenizer that has no chat template, or refuses the messages
        raise ConfigError(f"{place}: {err}") from err
