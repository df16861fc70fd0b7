"""Identity of a run's data: the hash that a claim carries and a resumed run must match.

The plain case, a file of JSON lines with every row of it, has the file's own SHA-256. All other
settings that decide which rows there are, and what they ask, go into the hash beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlstreams.streams.digests import file_sha256, json_sha256
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import DataSection
from rlstreams.workers.dataset.sources import RowFormat, source_of

# The place of data, and the way to reach it, do not change the content.
_NOT_SHAPE = frozenset({"train", "held_out", "revision", "token"})


def data_hashes(data: DataSection, names: Sequence[str] = ("train", "held_out")) -> dict[str, str]:
    """Hashes of `train` and `held_out`, hexadecimal; of data that are named and here."""
    return {
        field: found for field in names if (found := _data_hash(data, f"data.{field}")) is not None
    }


def shape_of(data: DataSection) -> dict[str, Any]:
    """The fields that decide which rows there are and what they ask, but for defaults.

    Raises:
        ConfigError: the template cannot be read.
    """
    given, default = msgspec.to_builtins(data), msgspec.to_builtins(DataSection())
    shape = {
        name: value
        for name, value in given.items()
        if name not in _NOT_SHAPE and value != default[name]
    }
    if data.template:
        try:
            shape["template"] = file_sha256(Path(data.template))
        except OSError as err:
            raise ConfigError(
                f"data.template: cannot read {data.template!r}: {err.strerror}"
            ) from err
    return shape


def _data_hash(data: DataSection, field: str) -> str | None:
    try:
        source = source_of(data, field)
        digest = source.digest()
        shape = shape_of(data)
    except (ConfigError, OSError):  # not on this machine: the role that reads it reports that
        return None
    if source.kind is RowFormat.JSON_LINES and not shape:
        return digest
    return json_sha256([digest, shape])
