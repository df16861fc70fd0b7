"""Files of the broker that are gone or damaged: put back from a copy, or reported with a cure."""

from __future__ import annotations

import re
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError

META = "meta.properties"  # in the data folder; a copy lies in the folder above
_CHECKPOINT = re.compile(r"checkpoint file [\[(]?(/.+?-checkpoint)(?=[])\s]|$)", re.MULTILINE)


def keep_identity(folder: Path, data: Path) -> None:
    """Keep a copy of the file that names the data's cluster, and put it back if it is gone.

    Formatted anew, a folder of topics serves none of them.

    Raises:
        ConfigError: it is gone, and there is no copy.
    """
    file, copy = data / META, folder / META
    if file.is_file():
        if not copy.is_file() or copy.read_bytes() != file.read_bytes():
            copy.write_bytes(file.read_bytes())
    elif any(data.glob("__cluster_metadata-*")):
        if not copy.is_file():
            raise ConfigError(
                f"broker data {data}: {META} is gone, which says of which cluster the topics there "
                "are; put it back from a copy of the folder"
            )
        file.write_bytes(copy.read_bytes())


def damaged_checkpoint(log: str) -> str:
    """Return the file of positions that Kafka could not read at its start, and the cure; or ""."""
    if not (found := _CHECKPOINT.findall(log)):
        return ""
    return (
        f"{found[-1]} is damaged; remove it, and start again: with one node Kafka makes it anew, "
        "and nothing is lost by that"
    )
