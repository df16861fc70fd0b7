"""A file that appears under its name whole or not at all, also in a folder that is shared."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstreams.workers.weights.channel import WeightError

_EPOCH = re.compile(r"-e(\d+)\.tmp$")  # at the end of an unfinished file's name


def unfinished_name(name: str, epoch: int) -> str:
    """Of a file on its way. A process id is unique on one machine only."""
    return f"{name}.{secrets.token_hex(8)}-e{epoch}.tmp"


def is_left_over(name: str, epoch: int) -> bool:
    """Whether a file of this name was left unfinished by a trainer before this epoch's, or by this
    one. A later epoch's may be in the making: the caller may have slept."""
    found = _EPOCH.search(name)
    return name.endswith(".tmp") and (found is None or int(found[1]) <= epoch)


def remove_left_overs(folder: Path, epoch: int) -> None:
    """Remove what is left over of unfinished files."""
    for torn in folder.glob("*.tmp"):
        if is_left_over(torn.name, epoch):
            torn.unlink(missing_ok=True)


@contextmanager
def whole_file(target: Path, epoch: int) -> Iterator[Path]:
    """A path to write to; behind the block the file is synced and has its name.

    After an error there is nothing.

    Raises:
        WeightError: a successor removed it before it was whole.
    """
    temporary = target.with_name(unfinished_name(target.name, epoch))
    try:
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    try:
        _sync(temporary)
        temporary.rename(target)
    except FileNotFoundError as err:
        raise WeightError(
            f"{temporary.name} was removed before it was whole: another trainer took over"
        ) from err
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
