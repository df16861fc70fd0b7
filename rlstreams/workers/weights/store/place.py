"""Place of a store: a folder of this machine, or a URL by fsspec. Files appear whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.whole_file import (
    is_left_over,
    remove_left_overs,
    unfinished_name,
    whole_file,
)


class Place(Protocol):
    """A folder. Errors of its file system are raised as OSError."""

    @property
    def address(self) -> str:
        """Path or URL by which others open it."""

    def sizes(self) -> Mapping[str, int]:
        """Size of each file, bytes; empty if the folder does not exist yet."""

    def reading(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file, open at its beginning.

        Raises:
            FileNotFoundError: it is not there.
        """

    def writing(self, name: str, epoch: int) -> AbstractContextManager[BinaryIO]:
        """A new file, which gets its name at the end of the block. After an error there is none."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def remove_left_overs(self, epoch: int) -> None:
        """Remove unfinished files; see `whole_file.is_left_over`."""


def place_of(address: str) -> Place:
    """The place that an address names; nothing is touched.

    Raises:
        WeightError: it is a URL, and the library for it is not installed.
    """
    return _Remote(address) if "://" in address else _Folder(Path(address).resolve())


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.address = str(path)

    def sizes(self) -> Mapping[str, int]:
        found = {}
        if self._path.exists():
            for path in self._path.iterdir():
                with contextlib.suppress(FileNotFoundError):  # it was just removed, or renamed
                    found[path.name] = path.stat().st_size
        return found

    def reading(self, name: str) -> AbstractContextManager[BinaryIO]:
        return (self._path / name).open("rb")

    @contextmanager
    def writing(self, name: str, epoch: int) -> Iterator[BinaryIO]:
        self._path.mkdir(parents=True, exist_ok=True)
        with whole_file(self._path / name, epoch) as temporary, temporary.open("wb") as out:
            yield out

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def remove_left_overs(self, epoch: int) -> None:
        remove_left_overs(self._path, epoch)


class _Remote:
    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            self._files: Any
            self._files, self._root = url_to_fs(self.address)
        except (ImportError, ValueError) as err:
            raise WeightError(
                f"store.url {address!r} cannot be opened: {err}; install fsspec and what it needs "
                "for this kind of URL, or name a folder"
            ) from err

    def sizes(self) -> Mapping[str, int]:
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return {}
        rows = self._files.ls(self._root, detail=True)
        return {row["name"].rpartition("/")[2]: int(row["size"] or 0) for row in rows}

    def reading(self, name: str) -> AbstractContextManager[BinaryIO]:
        file: AbstractContextManager[BinaryIO] = self._files.open(f"{self._root}/{name}", "rb")
        return file

    @contextmanager
    def writing(self, name: str, epoch: int) -> Iterator[BinaryIO]:
        self._files.makedirs(self._root, exist_ok=True)
        temporary = f"{self._root}/{unfinished_name(name, epoch)}"
        try:
            with self._files.open(temporary, "wb") as out:
                yield out
            self._files.mv(temporary, f"{self._root}/{name}")
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one that counts
                self._files.rm_file(temporary)
            raise

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def remove_left_overs(self, epoch: int) -> None:
        for name in self.sizes():
            if is_left_over(name, epoch):
                self.remove(name)
