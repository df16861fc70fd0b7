"""The sentence by which fused layers of a model differed, kept for later starts.

A start that finds it spares the compilation of fused layers. Those without fusion are compared at
each start, so a sentence that is wrong costs speed alone (decision 0104).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import rlstreams.workers.model
from rlstreams.streams.digests import file_sha256, json_sha256
from rlstreams.streams.log.cache import cache_folder
from rlstreams.streams.synced import write_whole
from rlstreams.workers.compute.spec import ModelSpec
from rlstreams.workers.model.base import CPU

LIBRARIES = ("torch", "transformers")
_SOURCES = Path(str(rlstreams.workers.model.__file__)).parent


class FusedFault:
    """A file of the cache folder, named by all that a trial depends on but the weights: the model's
    shape, how it is computed, device, libraries, our own code."""

    def __init__(self, spec: ModelSpec, model: Any, num_ranks: int) -> None:  # noqa: ANN401
        self._spec, self._model, self._num_ranks = spec, model, num_ranks

    @cached_property
    def _path(self) -> Path:
        first = next(self._model.parameters())
        device = torch.cuda.get_device_name(first.device) if first.is_cuda else CPU
        shape = str(self._model.config.to_json_string(use_diff=False))
        how = asdict(replace(self._spec, folder=Path(), asked_by=""))
        of = [shape, {name: str(value) for name, value in how.items()}, self._num_ranks, device]
        versions = [metadata.version(name) for name in LIBRARIES]
        code = [file_sha256(path) for path in sorted(_SOURCES.glob("*.py"))]
        return cache_folder() / "unfused" / f"{json_sha256([*of, versions, code])}.txt"

    def known(self) -> str:
        """See `KeptFault`."""
        try:
            return self._path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""

    def keep(self, why: str) -> None:
        """See `KeptFault`; without room nothing is kept."""
        with suppress(OSError):
            write_whole(self._path, f"{why}\n".encode())
