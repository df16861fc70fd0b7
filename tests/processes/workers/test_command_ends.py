"""How a command ends that is stopped, unheard, or cannot write: its status, and one line."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.workers.loop.ending import file_error_text, unwound_by_signals

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_what_a_command_began(number):
    """So a broker that was started for a look is stopped, and the status names the signal. A lost
    connection tells it twice, a session's end sends both, some after all is stopped."""
    stopped = []
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def command() -> None:
        with unwound_by_signals():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(signal.SIGHUP)
                stopped.append(True)

    try:
        with pytest.raises(SystemExit) as ended:
            command()
        signal.raise_signal(signal.SIGHUP)  # while Python ends
        assert (128 + number, [True]) == (ended.value.code, stopped)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hang_up_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with unwound_by_signals():
            signal.raise_signal(signal.SIGHUP)
            assert signal.SIG_IGN == signal.getsignal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_that_left_is_no_success():
    """What was to be said was not said: the status is that of SIGPIPE, without a traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "rlstreams", "config", "fields"],
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        check=False,
        timeout=120,
    )
    os.close(writing)
    assert (128 + signal.SIGPIPE, b"") == (done.returncode, done.stderr)


def test_text_that_the_terminal_cannot_spell_is_escaped(tmp_path):
    """An answer of a model, or a path, in letters that standard output does not have."""
    file = tmp_path / "run.toml"
    file.write_text("[run]\ndir = 'läufe'\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "rlstreams", "config", "show", str(file)],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
        timeout=120,
    )
    assert (0, True) == (done.returncode, b"l\\xe4ufe" in done.stdout)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "runs/demo/report.html"),
            "PermissionError: runs/demo/report.html: Permission denied",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "OSError: No space left on device; free some, or name another folder",
        ),
        (OSError(errno.EBADF, "Bad file descriptor"), ""),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(error, told):
    """With its name; what must be our own mistake keeps its traceback."""
    assert told == file_error_text(error)


def test_a_folder_that_cannot_be_written_is_told(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert 1 == main(["broker", "start", str(tmp_path / "file" / "broker")])
    assert f"NotADirectoryError: {tmp_path}/file" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b'{"run": {"id": "cut', b"\xff\xfe"])
def test_a_configuration_that_was_cut_is_named(tmp_path, capsys, content):
    """As a disk that was full leaves it, or a file that is none of ours."""
    (tmp_path / "config.json").write_bytes(content)
    assert 78 == main(["audit", str(tmp_path)])
    assert str(tmp_path / "config.json") in capsys.readouterr().err


def test_a_worker_without_its_file_says_so(tmp_path, capsys):
    """Status 78, which its supervisor does not answer with another start."""
    assert 78 == main(["worker", "rollout", str(tmp_path / "no.json")])
    assert f"{tmp_path}/no.json: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536", "99999"])
def test_a_port_out_of_range_is_refused(tmp_path, capsys, port):
    status = main(["broker", "start", str(tmp_path / "broker"), "--port", port])
    assert (2, False) == (status, (tmp_path / "broker").exists())
    said = capsys.readouterr().err
    assert all(word in said for word in ("--port", port, "65535"))


def test_a_working_directory_that_was_deleted_is_one_line(tmp_path, monkeypatch, capsys):
    """`doctor` and `up` ended with a trace, `inspect` said that there is no Java."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    for words in (["doctor"], ["demo"], ["inspect", str(tmp_path)]):
        assert 1 == main(words)
        told = capsys.readouterr().err
        assert (
            "the working directory was deleted: change to one that is there\n"
            == told.split(": ", 1)[1]
        )
    monkeypatch.chdir(tmp_path)
