"""Verifiers that take microseconds and cannot hang, so they run in the worker itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation

from rlstreams.workers.sandbox.reward import RewardError

# A sign counts only where no number stands before it: the last number of "10-3" is 3.
_NUMBER = re.compile(r"(?:(?<![0-9.])[-+])?(?:[0-9]+(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)")
_SAID = re.compile(r"(?i:answer)(?:\s*(?i:is)\b)?[\s:*(]*([A-Z])\b|\\boxed\{\s*\(?([A-Z])\b")
_LETTER = re.compile(r"\b([A-Z])\b")


def exact(completion: str, answer: str, *, ignore_case: bool = False) -> float:
    """1 if completion and answer are equal but for white space around them."""
    said, wanted = completion.strip(), answer.strip()
    if ignore_case:
        said, wanted = said.casefold(), wanted.casefold()
    return float(said == wanted)


def numeric(
    completion: str, answer: str, *, tolerance: float = 0.0, thousands: bool = False
) -> float:
    """1 if the completion's last number is the answer.

    Args:
        tolerance: largest distance that counts as equal.
        thousands: read `1,234` as one number; else commas separate numbers.

    Raises:
        RewardError: the answer is not a number.
    """
    if thousands:
        completion, answer = (re.sub(r"(?<=\d),(?=\d{3}\b)", "", t) for t in (completion, answer))
    try:
        wanted = Decimal(answer.strip())
    except InvalidOperation:
        wanted = Decimal("NaN")
    if not wanted.is_finite():
        raise RewardError(f"verifier numeric: the row's answer {answer!r} is not a number")
    numbers = _NUMBER.findall(completion)
    if not numbers:
        return 0.0
    return float(abs(Decimal(numbers[-1]) - wanted) <= Decimal(str(tolerance)))


def choice(completion: str, answer: str, *, letters: str = "ABCDEFGHIJ") -> float:
    """1 if the letter that the completion decides for is the answer's.

    That is the last one called the answer or boxed, else the last that stands alone.

    Args:
        letters: that can be chosen.

    Raises:
        RewardError: the answer is none of them.
    """
    wanted = answer.strip().strip("().").upper()
    if len(wanted) != 1 or wanted not in letters:
        raise RewardError(
            f"verifier choice: the row's answer {answer!r} is none of the letters {letters}"
        )
    said = [a or b for a, b in _SAID.findall(completion)] or _LETTER.findall(completion)
    chosen = [letter for letter in said if letter in letters]
    return float(bool(chosen) and chosen[-1] == wanted)


# Called with (completion, answer); keyword arguments are options.
QUICK_VERIFIERS: Mapping[str, Callable[..., float]] = {
    "exact": exact,
    "numeric": numeric,
    "choice": choice,
}
