"""What a page of ours must be: every tag that opens closes, in order."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "path", "rect", "circle", "input", "link"}


class Balance(HTMLParser):
    """Fails at the first tag that closes what was not opened last; `open` is what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag
