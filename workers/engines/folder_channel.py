"""Version 0 without a trainer: a model folder as something that an engine can pull."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.model.model import FLOAT32, load_model, weights_of
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.layout import layout_of, size_bytes, weight_hash

if TYPE_CHECKING:
    import torch


class FolderChannel:
    """A `WeightChannel` of one version, read from the folder."""

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

    @property
    def name(self) -> str:
        """`folder`."""
        return "folder"

    def can_pull(self, published: PolicyPublished) -> bool:
        """Only its own version."""
        return published.weight_hash == self.published.weight_hash

    def address(self) -> str:
        """A folder has no receiver."""
        return ""

    def order(
        self, published: PolicyPublished, deadline_s: float, *, server: str = ""
    ) -> dict[str, object]:
        """Always a WeightError: a model server loads the folder by itself."""
        raise WeightError(
            f"weights of {self.published.model} come from its folder, without an order"
        )

    def pull(
        self, published: PolicyPublished, deadline_s: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in name order."""
        del deadline_s
        assert self.can_pull(published), "one version only"
        yield from self._weights.items()
