"""The one error of this package, with a kind that crosses processes."""

from __future__ import annotations


class PullError(Exception):
    """A pull that did not happen.

    `kind` is one of: gone, refused, layout, link, checksum, deadline, server.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
