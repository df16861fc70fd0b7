"""Rewards in a module of a package."""

from __future__ import annotations


def right(prompt: str, completion: str, answer: str, metadata: object) -> float:
    """Whether the completion is the answer."""
    return float(completion == answer)


class Judge:
    """An object that can be called."""

    def __call__(self, prompt: str, completion: str, answer: str, metadata: object) -> float:
        return 1.0
