"""Any version of a run that is stored somewhere: in whole files of versions, or in stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.file import file_name
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.store.history import Chains, HeldVersion, WeightHistory
from rlstreams.workers.weights.store.place import Place, place_of
from rlstreams.workers.weights.store.version_file import Stamp

if TYPE_CHECKING:
    import torch

READ_S = 3600.0  # of one version: only the caller waits for it


class AtHand:
    """The versions of one run that can be had without redoing a step; a `WeightSource`.

    Args:
        hashes: by version, as the log has them.
        places: folders, or URLs of stores; one that cannot be listed counts as empty.
    """

    def __init__(self, run: str, hashes: Mapping[int, str], places: Iterable[str | Path]) -> None:
        self._run = run
        self._hashes = hashes
        self._files: dict[int, Path] = {}
        self._stores: dict[int, Place] = {}
        self._held: HeldVersion | None = None
        for address in dict.fromkeys(map(str, places)):
            try:
                place = place_of(address)
                sizes = place.sizes()
            except (WeightError, OSError):
                continue
            chains = Chains(sizes)
            for version, text in hashes.items():
                if (name := file_name(version, text)) in sizes:
                    self._files.setdefault(version, Path(place.address) / name)
                if isinstance(chains.way(Stamp.of(version, text)), list):
                    self._stores.setdefault(version, place)

    @property
    def versions(self) -> frozenset[int]:
        """Versions that are stored."""
        return frozenset(self._files) | frozenset(self._stores)

    def weights_at(self, version: int, deadline_s: float = READ_S) -> dict[str, torch.Tensor]:
        """A version's tensors in name order, checked against the log's hash.

        Raises:
            WeightError: it is not stored, or its files are damaged; names the file.
        """
        text = self._hashes.get(version, "")
        if path := self._files.get(version):
            from rlstreams.workers.weights.link.safetensors_file import read

            try:
                return read(path, text)
            except PullError as err:
                raise WeightError(f"policy version {version}: {err}") from err
        if place := self._stores.get(version):
            history = WeightHistory(place, self._run)
            self._held = history.weights_at(version, text, deadline_s, self._held)
            return {name: tensor.clone() for name, tensor in self._held.tensors.items()}
        raise WeightError(f"policy version {version} of run {self._run} is not at hand")

    def pull(
        self, published: PolicyPublished, deadline_s: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource`."""
        yield from self.weights_at(published.policy_version, deadline_s).items()
