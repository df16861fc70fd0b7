"""The cache folder of every kind of user."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from rlstreams.streams.log.cache import cache_folder
from rlstreams.streams.log.errors import ConfigError


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of a user with a number, and neither name nor home."""
    for name in ("RLSTREAMS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for such a user
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid)
    return tmp_path


def test_a_user_without_a_home_has_one_of_its_own_among_temporary_files(temporary: Path) -> None:
    folder = cache_folder()
    assert (temporary, 0o700) == (folder.parent, folder.stat().st_mode & 0o777)
    assert folder == cache_folder()


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_what_others_can_write_is_refused_there(temporary: Path, kind: str) -> None:
    """The broker's classes and bytecode lie there, which are code."""
    folder = temporary / cache_folder().name
    folder.rmdir()
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "link":
        folder.symlink_to(temporary)
    else:
        folder.touch()
    with pytest.raises(ConfigError, match=f"no home folder, and {folder} .* in RLSTREAMS_CACHE"):
        cache_folder()
