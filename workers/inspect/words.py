"""The text of each token of a sequence, such that joined they are the text of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_WINDOW, _OVERLAP = 24, 8  # tokens decoded together; kept when the window moves on
_LONGEST_CHARACTER = 8  # tokens
_TORN = "\ufffd"  # what decoders give for the first bytes of a character


def words(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """One text for each token.

    A character that takes several tokens stands at the last of them. Only the tokens of a short
    window are decoded again for the next one, so the time grows with the length, not its square.
    """
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
