"""The channel `store`: versions are read from the store, each next one as its difference."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.schemas.events import Endpoint, PolicyPublished, PullRequested
from rlstreams.workers.weights.channel import (
    STORE,
    WeightError,
    WeightManifest,
    addresses_of,
    refuse_other,
)
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from rlstreams.workers.weights.layout import layout_difference, layout_of, manifest_of
from rlstreams.workers.weights.store.history import HeldVersion, WeightHistory
from rlstreams.workers.weights.store.place import place_of
from rlstreams.workers.weights.store.version_file import Stamp

if TYPE_CHECKING:
    import torch

_FILES_KEPT = 2  # a model server may be reading them


class StoreWeightChannel:
    """A worker's end: keeps the version that it pulled last, in host memory.

    Args:
        folder: for the file that a model server receives.
    """

    name = STORE

    def __init__(self, run: str, folder: Path | None = None) -> None:
        self._run = run
        self._folder = folder
        self._held: HeldVersion | None = None
        self._lock = threading.Lock()

    def can_pull(self, published: PolicyPublished) -> bool:
        """Whether the log has the version in a store."""
        return any(end.channel == STORE for end in published.endpoints)

    def address(self) -> str:
        """Empty: a file has no receiver."""
        return ""

    def order(
        self, published: PolicyPublished, deadline_s: float, *, server: str = ""
    ) -> dict[str, object]:
        """An order with a file of the whole version, written here: servers know no store."""
        assert self._folder is not None, "made for a model server"
        tensors = self._tensors(published, deadline_s)
        files = FileWeightServer(self._folder, keep=_FILES_KEPT)
        files.publish(published.policy_version, tensors, published.weight_hash)
        whole = replace(published, endpoints=tuple(files.endpoints()))
        return FileWeightChannel().order(whole, deadline_s, server=server)

    def pull(
        self, published: PolicyPublished, deadline_s: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in name order; see `WeightChannel.pull`."""
        tensors = self._tensors(published, deadline_s)
        if difference := layout_difference(expected=published.layout, found=layout_of(tensors)):
            version = published.policy_version
            raise WeightError(f"policy version {version} from its store: {difference}")
        for name, tensor in tensors.items():
            yield name, tensor.clone()  # an engine may keep its tensors

    def _tensors(self, published: PolicyPublished, deadline_s: float) -> Mapping[str, torch.Tensor]:
        address = addresses_of(published, STORE)[-1]
        stamp = Stamp.of(published.policy_version, published.weight_hash)
        if not self._lock.acquire(timeout=deadline_s):
            raise WeightError(
                f"policy version {published.policy_version}: another pull of this worker "
                f"was not over within {deadline_s:g} s"
            )
        try:
            if self._held is None or self._held.stamp != stamp:
                history = WeightHistory(place_of(address), self._run)
                version, text = published.policy_version, published.weight_hash
                self._held = history.weights_at(version, text, deadline_s, self._held)
            return self._held.tensors
        finally:
            self._lock.release()


class StoreWeightServer:
    """The trainer's end without another channel: versions are announced, and then stored."""

    def __init__(self) -> None:
        self._hashes: dict[int, str] = {}

    def open(self, epoch: int) -> None:
        """Do nothing: no listener is needed."""

    def publish(
        self,
        policy_version: int,
        weights: Mapping[str, torch.Tensor],
        known_hash: str | None = None,
    ) -> WeightManifest:
        """The version's manifest; `writer.py` writes the store. See `WeightServer`."""
        manifest = manifest_of(policy_version, weights, known_hash)
        had = self._hashes.setdefault(policy_version, manifest.weight_hash)
        refuse_other(policy_version, had, manifest.weight_hash)
        self.retire(1)
        return manifest

    def endpoints(self) -> Sequence[Endpoint]:
        """None: `PolicyStored` names the store, once it has the version."""
        return ()

    def serve(self, request: PullRequested) -> None:
        """Do nothing: workers read files."""

    def versions(self) -> Sequence[int]:
        """The newest version; the store has older ones."""
        return sorted(self._hashes)

    def finish(self, deadline_s: float) -> None:
        """Do nothing: files stay."""

    def retire(self, keep: int) -> None:
        """Forget all but the newest `keep`; the store has a limit of its own."""
        for version in sorted(self._hashes)[: -keep or None]:
            del self._hashes[version]

    def close(self) -> None:
        """Do nothing."""
