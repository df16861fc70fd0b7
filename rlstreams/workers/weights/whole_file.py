"""A file that appears under its name whole or not at all, even in a shared folder."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstreams.streams.synced import replace_synced
from rlstreams.workers.weights.channel import WeightError

_EPOCH = re.compile(r"-e(\d+)\.tmp$")  # at the end of an unfinished file's name


def unfinished_name(name: str, epoch: int) -> str:
    """Name of an unfinished file. Random, as a process id is unique on one machine only."""
    return f"{name}.{secrets.token_hex(8)}-e{epoch}.tmp"


def is_left_over(name: str, epoch: int) -> bool:
    """Whether a file of this name was left unfinished by a trainer of this or an earlier epoch. A
    later epoch's may still be written: the caller may have slept."""
    found = _EPOCH.search(name)
    return name.endswith(".tmp") and (found is None or int(found[1]) <= epoch)


def remove_left_overs(folder: Path, epoch: int) -> None:
    """Remove unfinished files of this and earlier epochs."""
    for torn in folder.glob("*.tmp"):
        if is_left_over(torn.name, epoch):
            torn.unlink(missing_ok=True)


@contextmanager
def whole_file(target: Path, epoch: int) -> Iterator[Path]:
    """A path to write to; at the end of the block the file is synced and gets its name.

    After an error there is no file.

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
        replace_synced(temporary, target)
    except FileNotFoundError as err:
        raise WeightError(
            f"{temporary.name} was removed before it was whole: another trainer took over"
        ) from err
