"""Version 0 without a trainer: a model folder as something that an engine can pull."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.model.model import FLOAT32, load_model, weights_of
from rlstreams.workers.weights.layout import layout_of, size_bytes, weight_hash

if TYPE_CHECKING:
    import torch


class FolderChannel:
    """A `WeightSource` of one version, read from the folder."""

    def __init__(self, folder: Path, dtype: str = FLOAT32) -> None:
        """Load the weights, in this dtype.

        Raises:
            EngineError: the folder cannot be loaded.
        """
        self._weights = weights_of(load_model(folder, dtype))
        self.published = PolicyPublished(
            model=folder.name,
            policy_version=0,
            weight_hash=weight_hash(self._weights),
            epoch=0,
            instance="",
            step=0,
            num_bytes=size_bytes(self._weights),
            layout=layout_of(self._weights),
            endpoints=(),
            versions_served=(0,),
            published_at_ms=0,
        )

    def pull(
        self, published: PolicyPublished, deadline_s: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in name order."""
        del deadline_s
        assert published.weight_hash == self.published.weight_hash, "one version only"
        yield from self._weights.items()
