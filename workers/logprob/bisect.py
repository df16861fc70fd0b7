"""Find the records that make a forward pass fail, and score all others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rlstreams.workers.model.base import EngineError

T = TypeVar("T")
S = TypeVar("S")


def score_in_halves(
    window: Sequence[T], score: Callable[[Sequence[T]], Sequence[S]]
) -> list[S | Exception]:
    """The score of each record, or what the scorer raised for it alone.

    A window that fails is split in halves, and so on: one bad record among n costs about 2 log2(n)
    forwards more.

    Raises:
        Exception: the scorer's, where several records were tried alone, each failed, and it was no
            refusal (EngineError): then the scorer is broken, and no record is to blame.
    """
    found = _halves(window, score)
    errors = [result for result in found if isinstance(result, Exception)]
    if len(errors) == len(window) > 1 and not all(isinstance(e, EngineError) for e in errors):
        raise errors[0]
    return found


def _halves(
    window: Sequence[T], score: Callable[[Sequence[T]], Sequence[S]]
) -> list[S | Exception]:
    try:
        return list(score(window))
    except Exception as err:  # noqa: BLE001  (the dead-letter border)
        if len(window) <= 1:
            return [err]
    middle = len(window) // 2
    return [*_halves(window[:middle], score), *_halves(window[middle:], score)]
