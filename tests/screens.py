"""Screens of one recorded run, whole: what commands print of it lies in `tests/golden/screens`.

    python -m tests.screens        # makes them anew; look at the difference before you commit it

Spaces at the end of a line and the length of a drawn line belong to the terminal, and are left out;
of the report stand its words, for its shape is looked at in a browser (`tests/processes/web`).
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import re
import tempfile
from pathlib import Path

from rlstreams.__main__ import main as rlstreams
from tests.unit.inspect import told_run

FOLDER = Path(__file__).parent / "golden/screens"
# Name: the words behind `rlstreams`; RUN is the recording, OUT a folder beside it. It holds a
# sample over two versions, a copy, a dropped group, an evaluation, what waits, and records that
# cannot be read.
SCREENS = {
    "inspect-sample": ("inspect", "1/0", "RUN"),
    "inspect-group": ("inspect", "0", "RUN"),
    "inspect-worst": ("inspect", "RUN", "--worst", "reward", "--limit", "4"),
    "audit": ("audit", "RUN"),
    "report": ("report", "RUN", "--out", "OUT"),
}
_WIDTH = "160"
_UNREAD = re.compile(r"<(style|script|svg)\b.*?</\1>", re.DOTALL)
_BLOCK = re.compile(r"<(?:tr|p|h\d|li|div|table|section|details|summary|pre)\b[^>]*>")
_TAG = re.compile(r"<[^>]+>")
_MADE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d UTC$", re.MULTILINE)


def screen(name: str, run: Path) -> str:
    """What the command says, its errors behind it, and its status."""
    out = run.with_name("out")
    places = {"RUN": str(run), "OUT": str(out)}
    words = [places.get(word, word) for word in SCREENS[name]]
    said, errors = io.StringIO(), io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _WIDTH
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
            status = rlstreams(words)
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    text = f"{said.getvalue()}-- errors\n{errors.getvalue()}-- status {status}\n"
    if "OUT" in SCREENS[name]:
        text += f"-- page\n{page((out / 'report.html').read_text('utf-8'))}\n-- steps\n"
        text += (out / "steps.csv").read_text("utf-8")
    for word, place in places.items():
        text = text.replace(place, word)
    text = re.sub("[─━]{3,}", "───", text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def page(text: str) -> str:
    """The words of a page, a line for each of its blocks; without the time when it was made."""
    bare = _TAG.sub(" ", _BLOCK.sub("\n", _UNREAD.sub("", text)))
    lines = (" ".join(html.unescape(line).split()) for line in bare.splitlines())
    return _MADE.sub("MADE", "\n".join(line for line in lines if line))


def recorded(folder: Path) -> Path:
    """The run, made anew."""
    return Path(told_run.recorded(folder / "told", told_run.memory_bus()))


def main() -> None:
    """Make all of them anew."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = recorded(Path(folder))
        for name in SCREENS:
            (FOLDER / f"{name}.txt").write_text(screen(name, run), "utf-8")


if __name__ == "__main__":
    main()
