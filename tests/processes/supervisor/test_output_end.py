"""What `up` leaves at its end where its reader is there and does not read."""

from __future__ import annotations

import os
import pty
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rlstreams.up.supervisor import output
from rlstreams.up.supervisor.output import lasting
from tests.processes.supervisor.test_output import (
    ROOT,
    SECONDS,
    read_some,
    read_until,
    wait_until_read,
)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PATIENCE_S", 0.3)


# What a run does to a terminal that nobody reads, and what it leaves.
_UNREAD = """
import sys
from pathlib import Path
from rich.console import Console
from rich.live import Live
from rlstreams.up.supervisor import output
from rlstreams.up.supervisor.keyboard import Keyboard
output.PATIENCE_S = 0.3
with output.lasting(Path({log!r})):
    console = Console(force_terminal=True)
    with Keyboard(), Live("", console=console, screen=True, auto_refresh=False) as live:
        print("ready")
        {halt}
        for number in range(3000):
            live.update("x" * 1500 + str(number), refresh=True)
            if sys.stdout.is_unread:
                break
    print("summary")
"""


@pytest.mark.parametrize("is_halted", [False, True])
def test_a_terminal_unread_at_the_end_is_left_as_it_was(tmp_path: Path, is_halted: bool) -> None:
    """By Ctrl-S, or in a window that hangs: `up` ends, no screen stays, and no hidden cursor."""
    log = tmp_path / "logs/up.log"
    code = _UNREAD.format(log=str(log), halt="sys.stdin.read(1)" if is_halted else "")
    process, ours = pty.fork()
    if not process:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-c", code], {**os.environ, "TERM": "xterm"})
    seen = b""
    if is_halted:
        while b"ready" not in seen:
            seen += read_some(ours)
        os.write(ours, b"\x13y")  # Ctrl-S, and the key that it waits for
        reader = threading.Thread(target=lambda: rest.extend(iter(lambda: read_some(ours), b"")))
        rest: list[bytes] = []
        reader.start()
    try:
        assert 0 == exit_code(process)
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    if is_halted:
        reader.join(SECONDS)
        seen += b"".join(rest)
    else:
        seen += b"".join(iter(lambda: read_some(ours), b""))
    os.close(ours)
    _, entered, told = seen.partition(b"\x1b[?1049h")
    assert entered
    assert b"\x1b[?1049l" in told
    assert told.rindex(b"\x1b[?25h") > told.rindex(b"\x1b[?25l")
    assert b"summary" in told
    assert "summary" in log.read_text("utf-8")


def exit_code(process: int) -> int | None:
    """Of a child; None if it goes on."""
    until_s = time.monotonic() + SECONDS / 3
    while time.monotonic() < until_s:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def test_a_reader_that_reads_again_is_told_the_rest_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more was said from then on, but the end."""
    theirs, ours = os.pipe()
    log = tmp_path / "logs/up.log"
    seen: list[bytes] = []
    reader = threading.Thread(
        target=lambda: seen.extend(iter(lambda: os.read(theirs, 65_536), b""))
    )
    with open(ours, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        with lasting(log):
            sys.stdout.write("x" * 100_000 + "\n")
            sys.stdout.write("summary\n")
            reader.start()
            wait_until_read(sys.stdout)
    reader.join(SECONDS)
    os.close(theirs)
    assert b"".join(seen).endswith(b"x\nsummary\n")
    assert "it is read again" in log.read_text("utf-8").splitlines()[-1]


def test_a_reader_that_left_unread_refuses_nothing_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`q` in the pager when all was said: what is written behind the end is in the file."""
    theirs, ours = os.pipe()
    log = tmp_path / "logs/up.log"
    with open(ours, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        with lasting(log):
            sys.stdout.write("x" * 100_000 + "\n")
            os.close(theirs)
            wait_until_read(sys.stdout)
        stream.write("behind\n")
        stream.flush()
    assert "behind" == log.read_text("utf-8").splitlines()[-1]


@pytest.fixture
def interrupted() -> Iterator[None]:
    """As in a terminal: what a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupted")
def test_what_an_interrupt_cut_short_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a reader is waited for that does not read on."""
    theirs, ours = os.pipe()
    log = tmp_path / "logs/up.log"
    full = "x" * 100_000
    with open(ours, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        with lasting(log):
            monkeypatch.setattr(output, "PATIENCE_S", SECONDS)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                sys.stdout.write(f"{full}\n")
            sys.stdout.write("summary\n")
        told = [line for line in log.read_text("utf-8").splitlines() if "UTC:" not in line]
        read_until(theirs, b"x\n")
    os.close(theirs)
    assert [full, "summary"] == told
