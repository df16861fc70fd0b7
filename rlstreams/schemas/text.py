"""Text that UTF-8 can hold: JSON and Python know more."""

from __future__ import annotations


def whole_text(text: str) -> str:
    r"""The text, with the escape `\ud83d` for half of a surrogate pair, as programs leave one where
    they cut a text in the middle of a character."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
