"""Verifiers that take microseconds and cannot hang, so they run in the worker itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation

from rlstreams.workers.rollout.reward import Judgement, Metadata, RewardError

# A sign counts only where no number stands before it: the last number of "10-3" is 3.
_NUMBER = re.compile(r"(?:(?<![0-9.])[-+])?(?:[0-9]+(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)")
_SAID = re.compile(r"(?i:answer)(?:\s*(?i:is)\b)?[\s:*(]*([A-Z])\b|\\boxed\{\s*\(?([A-Z])\b")
_LETTER = re.compile(r"\b([A-Z])\b")


def exact(
    prompt: str, completion: str, answer: str, metadata: Metadata, *, ignore_case: bool = False
) -> Judgement:
    """1 if completion and answer are equal but for white space around them."""
    del prompt, metadata
    said, wanted = completion.strip(), answer.strip()
    if ignore_case:
        said, wanted = said.casefold(), wanted.casefold()
    return Judgement(reward=float(said == wanted))


def numeric(
    prompt: str,
    completion: str,
    answer: str,
    metadata: Metadata,
    *,
    tolerance: float = 0.0,
    thousands: bool = False,
) -> Judgement:
    """1 if the completion's last number is the answer.

    Args:
        tolerance: largest distance that counts as equal.
        thousands: read `1,234` as one number; else commas separate numbers.

    Raises:
        RewardError: the answer is not a number.
    """
    del prompt, metadata
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
        return Judgement(reward=0.0)
    return Judgement(reward=float(abs(Decimal(numbers[-1]) - wanted) <= Decimal(str(tolerance))))


def choice(
    prompt: str, completion: str, answer: str, metadata: Metadata, *, letters: str = "ABCDEFGHIJ"
) -> Judgement:
    """1 if the letter that the completion decides for is the answer's.

    That is the last one called the answer or boxed, else the last that stands alone.

    Args:
        letters: that can be chosen.

    Raises:
        RewardError: the answer is none of them.
    """
    del prompt, metadata
    wanted = answer.strip().strip("().").upper()
    if len(wanted) != 1 or wanted not in letters:
        raise RewardError(
            f"verifier choice: the row's answer {answer!r} is none of the letters {letters}"
        )
    said = [a or b for a, b in _SAID.findall(completion)] or _LETTER.findall(completion)
    chosen = [letter for letter in said if letter in letters]
    return Judgement(reward=float(bool(chosen) and chosen[-1] == wanted))


# Called with (prompt, completion, answer, metadata); keyword arguments are options.
JUDGES: Mapping[str, Callable[..., Judgement]] = {
    "exact": exact,
    "numeric": numeric,
    "choice": choice,
}
