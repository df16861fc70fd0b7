"""The text of each token of a sequence; joined, these texts are the text of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError

_WINDOW, _OVERLAP = 24, 8  # tokens decoded together; tokens kept when the window moves on
_LONGEST_CHARACTER = 8  # tokens
_TORN = "\ufffd"  # what decoders give for the first bytes of a character


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """Functions from tokens to text, and the hash of their tokenizer."""

    decode: Callable[[Sequence[int]], str]  # special tokens are shown
    plain: Callable[[Sequence[int]], str]  # special tokens are left out; takes any numbers
    hash: str  # of the tokenizer; empty: tokens are shown as numbers


def _numbers(token_ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in token_ids)


NUMBERS = Spelling(decode=_numbers, plain=_numbers, hash="")
"""The spelling without a tokenizer: each token as its number."""


def words(token_ids: Sequence[int], spelling: Spelling) -> list[str]:
    """Return one text for each token.

    A character that takes several tokens stands at the last of them. Only the tokens of a short
    window are decoded again for the next one, so the time grows with the length, not its square.
    """
    if not spelling.hash:
        return [f"{token} " for token in token_ids]
    decode = spelling.decode
    found: list[str] = []
    start, shown = 0, ""
    torn = 0  # tokens of an unfinished character
    for end in range(1, len(token_ids) + 1):
        whole = decode(token_ids[start:end])
        is_torn = whole.endswith(_TORN) and torn + 1 < _LONGEST_CHARACTER
        if is_torn and end < len(token_ids):
            torn += 1
            found.append("")
            continue
        torn = 0
        found.append(whole[len(shown) :])
        shown = whole
        if end - start >= _WINDOW:
            start = end - _OVERLAP
            shown = decode(token_ids[start:end])
    return found


def spelling(named: str, of_run: str) -> Spelling:
    """Return the spelling by the tokenizer in the named folder, else in the run's model folder.

    Raises:
        ConfigError: the named tokenizer cannot be loaded. Without the run's own, numbers show.
    """
    from rlstreams.workers.config.hub import found_folder
    from rlstreams.workers.model.tokenizer import Tokenizer, TokenizerError

    try:
        folder = named or (of_run and found_folder(of_run)) or of_run
        tokenizer = Tokenizer.load(Path(folder))
    except TokenizerError as err:
        if named:
            raise ConfigError(f"--tokenizer: {err}") from err
        return NUMBERS

    def plain(token_ids: Sequence[int]) -> str:
        try:
            return tokenizer.decode(token_ids)
        except (OverflowError, TypeError):  # a foreign writer's: no tokens of the model
            return _numbers(token_ids)

    return Spelling(
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        plain=plain,
        hash=tokenizer.hash,
    )
