"""Tensors of a model folder, read in shares: no rank has a whole model in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlstreams.workers.model.base import EngineError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FUSED = re.compile(r"(.*\.experts\.)(gate_up|down)_proj")


class FolderFiles:
    """The safetensors files of one folder; they stay open as long as this object.

    Raises:
        EngineError: no such files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._file_of: dict[str, str]
        try:
            index = folder / _INDEX
            if index.exists():
                self._file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            else:
                self._file_of = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        except (OSError, ValueError, KeyError) as err:
            raise EngineError(f"model folder {str(folder)!r}: {err}") from err

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor | None:
        """A share of a tensor; None: there is no such tensor. Files may hold experts one by one."""
        if name in self._file_of:
            found: Tensor = self._file(self._file_of[name]).get_slice(name)[index]
            return found
        fused = _FUSED.fullmatch(name)
        if fused is None:
            return None
        before, kind = fused.groups()
        letters = ("gate", "up") if kind == "gate_up" else ("down",)
        numbers = range(index[0].start, index[0].stop)
        names = [[f"{before}{n}.{letter}_proj.weight" for letter in letters] for n in numbers]
        if names[0][0] not in self._file_of:
            return None
        return torch.stack([torch.cat([self._whole(name) for name in own]) for own in names])

    def _whole(self, name: str) -> Tensor:
        found: Tensor = self._file(self._file_of[name]).get_tensor(name)
        return found

    def _file(self, name: str) -> Any:  # noqa: ANN401
        from safetensors import safe_open

        if name not in self._open:
            self._open[name] = safe_open(self._folder / name, framework="pt")
        return self._open[name]
