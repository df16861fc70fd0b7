"""Weight sources without a trainer: weights in memory, or of a model folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.model.model import FLOAT32, load_model, weights_of
from rlstreams.workers.weights.layout import layout_of, size_bytes, weight_hash

if TYPE_CHECKING:
    import torch


class HeldWeights:
    """A `WeightSource` of one version, in memory.

    Args:
        weights: by name, in name order.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], model: str, version: int = 0) -> None:
        self._weights = weights
        self.published = PolicyPublished(
            model=model,
            policy_version=version,
            weight_hash=weight_hash(weights),
            epoch=0,
            instance="",
            step=version,
            num_bytes=size_bytes(weights),
            layout=layout_of(weights),
            endpoints=(),
            versions_served=(version,),
            published_at_ms=0,
        )

    def pull(
        self, published: PolicyPublished, deadline_s: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in name order."""
        del deadline_s
        assert published.weight_hash == self.published.weight_hash, "one version only"
        yield from self._weights.items()


class FolderChannel(HeldWeights):
    """Version 0, read from the folder."""

    def __init__(self, folder: Path, dtype: str = FLOAT32) -> None:
        """Load the weights, in this dtype.

        Raises:
            EngineError: the folder cannot be loaded.
        """
        super().__init__(weights_of(load_model(folder, dtype)), folder.name)
