"""A file that appears under its name whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlstreams.streams.synced import beside, write_whole


@pytest.mark.parametrize(("is_private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_private_file_is_its_owners_alone(tmp_path: Path, is_private: bool, mode: int) -> None:
    """Whatever the mode of the file before."""
    file, before = tmp_path / "new" / "file", os.umask(0o022)
    try:
        for content in (b"first", b"second"):
            write_whole(file, content, is_private=is_private)
            assert (content, mode) == (file.read_bytes(), file.stat().st_mode & 0o777)
            file.chmod(0o666)
    finally:
        os.umask(before)


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """Not even with one process id, as in containers that share a folder: the last to end wins."""
    file = tmp_path / "file"
    with beside(file) as unfinished:
        write_whole(file, b"second")
        assert b"second" == file.read_bytes()
        unfinished.write_bytes(b"first")
    assert [file] == list(tmp_path.iterdir())
    assert b"first" == file.read_bytes()


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is given at the end."""
    file = tmp_path / "file"
    write_whole(file, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, b"new")
    assert b"old" == file.read_bytes()
    assert [file] == list(tmp_path.iterdir()), "half a file would fill the disk further"
