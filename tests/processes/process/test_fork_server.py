"""The fork server's socket: its path has room for 103 bytes, and a user's folder may have more."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.streams.process import fork_server
from rlstreams.streams.process.fork_server import LONGEST, fork_context

ROOT = Path(__file__).parents[3]
FORKS = """
import multiprocessing, os, tempfile
from rlstreams.streams.process.fork_server import ForkServer, fork_context
ForkServer(fork_context(), [])
process = fork_context().Process(target=os._exit, args=(7,))
process.start()
process.join()
print(process.exitcode, tempfile.gettempdir())
"""


def of_bytes(size: int, folder: Path) -> Path:
    """A folder below that one whose path has so many bytes."""
    room = size - len(os.fsencode(folder)) - 1
    assert room > 0, f"{folder} is too long for this test"
    found = folder / ("ü" * (room // 2) + "x" * (room % 2))
    found.mkdir()
    return found


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("size", [LONGEST, LONGEST + 1, 120])
def test_it_forks_whatever_folder_is_for_temporary_files(size: int, short: Path) -> None:
    """What else is temporary stays where the user wants it."""
    folder = of_bytes(size, short)
    done = subprocess.run(
        [sys.executable, "-c", FORKS], cwd=ROOT, env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (f"7 {folder}\n", "") == (done.stdout, done.stderr)
    assert [] == list(folder.iterdir())


def test_without_a_short_folder_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes then start one by one."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + LONGEST * "x")
    monkeypatch.setattr(fork_server.os, "access", lambda *_: False)
    assert fork_context() is None
