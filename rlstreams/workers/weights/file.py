"""Weights as files: the channel `file`, one safetensors file per version in a shared folder.

The server writes to a temporary file, syncs and renames, so a file with the final name is complete.
The number and the hash are in the name and in the file's header; kept versions can be read without
a server, also by a worker that starts after the trainer has exited.

A suspended trainer that wakes up next to its successor does no harm here: its files have other
names or the same bytes, it removes nothing newer than its own last version, and its unfinished
file was deleted at the successor's first version.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.schemas.events import Endpoint, PolicyPublished, PullRequested
from rlstreams.workers.weights.channel import (
    VersionGoneError,
    WeightError,
    WeightManifest,
    addresses_of,
    order_of,
    refuse_other,
)
from rlstreams.workers.weights.layout import layout_difference, layout_of, manifest_of
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.whole_file import remove_left_overs, whole_file

if TYPE_CHECKING:
    import torch

CHANNEL = "file"
_HASH_DIGITS = 12  # in a file's name; the whole hash is in its header
_PATTERN = "v*-*.safetensors"


def file_name(policy_version: int, weight_hash: str) -> str:
    """Name of a version's file, as `v00000007-0123456789ab.safetensors`."""
    return f"v{policy_version:08d}-{weight_hash[:_HASH_DIGITS]}.safetensors"


def _files(folder: Path) -> dict[int, Path]:
    """Files of the versions in a folder, oldest first."""
    return {int(path.name[1:].partition("-")[0]): path for path in sorted(folder.glob(_PATTERN))}


class FileWeightServer:
    """The trainer's end: a folder of versions, of which the newest `keep` stay."""

    def __init__(self, folder: Path | str, keep: int) -> None:
        """Serve the files in `folder`. Nothing is touched before the first version."""
        self._folder = Path(folder).resolve()
        self._keep = keep
        self._newest: int | None = None  # of the versions published here
        self._epoch = 0
        self._folder.mkdir(parents=True, exist_ok=True)

    def open(self, epoch: int) -> None:
        """Keep the epoch, which marks unfinished files; a folder serves every reader."""
        self._epoch = epoch

    def publish(
        self,
        policy_version: int,
        weights: Mapping[str, torch.Tensor],
        known_hash: str | None = None,
    ) -> WeightManifest:
        """Write the version; see `WeightServer.publish`. Older ones beyond `keep` are removed.

        The first call removes half-written files of predecessors. The constructor does not: its
        caller may still find that another trainer is alive, and writing.
        """
        if self._newest is None:
            remove_left_overs(self._folder, self._epoch)
        manifest = manifest_of(policy_version, weights, known_hash)
        existing = _files(self._folder).get(policy_version)
        target = self._folder / file_name(policy_version, manifest.weight_hash)
        if existing is None:
            _write(target, weights, manifest, self._epoch)
        else:
            refuse_other(policy_version, existing.name, target.name)
        self._newest = max(policy_version, self._newest or 0)
        self.retire(self._keep)
        return manifest

    def endpoints(self) -> Sequence[Endpoint]:
        """The folder's absolute path."""
        return (Endpoint(channel=CHANNEL, address=str(self._folder)),)

    def serve(self, request: PullRequested) -> None:
        """Do nothing: workers read the files."""

    def versions(self) -> Sequence[int]:
        """Versions that can be pulled, oldest first."""
        return list(_files(self._folder))

    def finish(self, deadline_s: float) -> None:
        """Do nothing: files stay."""

    def retire(self, keep: int) -> None:
        """Remove all but the newest `keep` versions. A reader that has a file open keeps it.

        Versions above the newest one published here are a successor's, and not counted.
        """
        newest = -1 if self._newest is None else self._newest
        ours = [path for version, path in _files(self._folder).items() if version <= newest]
        for path in ours[: -keep or None]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing: the files stay."""


def _write(
    target: Path, weights: Mapping[str, torch.Tensor], manifest: WeightManifest, epoch: int
) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    metadata = {
        "policy_version": str(manifest.policy_version),
        "weight_hash": manifest.weight_hash,
    }
    with whole_file(target, epoch) as temporary:
        save_file(tensors, temporary, metadata)


class FileWeightChannel:
    """A worker's end: reads the files in the endpoint's folder."""

    name = CHANNEL

    def can_pull(self, published: PolicyPublished) -> bool:
        """Whether the version's file is there."""
        try:
            return self._find(published).exists()
        except WeightError:
            return False

    def address(self) -> str:
        """Empty: a file has no receiver."""
        return ""

    def order(
        self, published: PolicyPublished, deadline_s: float, *, server: str = ""
    ) -> dict[str, object]:
        """The file's path and content hash; a model server reads it where it sees the folder."""
        address = str(self._find(published))
        return order_of(published, deadline_s, channel=CHANNEL, address=address, receiver=server)

    def pull(
        self, published: PolicyPublished, deadline_s: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in name order, mapped from the file; see `WeightChannel.pull`."""
        from rlstreams.workers.weights.link.safetensors_file import read

        until_s = time.monotonic() + deadline_s
        path = self._find(published)
        try:
            tensors = read(path, published.weight_hash)
        except PullError as err:
            if err.kind == "gone":
                self._find(published)  # raises: the file was removed since
            raise WeightError(f"policy version {published.policy_version}: {err}") from err
        if difference := layout_difference(expected=published.layout, found=layout_of(tensors)):
            raise WeightError(f"{path}: {difference}")
        if time.monotonic() > until_s:
            raise WeightError(f"{path}: not read within {deadline_s:g} s")
        yield from tensors.items()

    def _find(self, published: PolicyPublished) -> Path:
        """The version's file.

        Raises:
            WeightError: no endpoint of this channel, or no longer served.
        """
        folders = [Path(address) for address in addresses_of(published, CHANNEL)]
        name = file_name(published.policy_version, published.weight_hash)
        for folder in folders:
            if (folder / name).exists():
                return folder / name
        raise VersionGoneError(
            f"policy version {published.policy_version} is no longer served: "
            + "; ".join(f"{folder} holds {list(_files(folder)) or 'none'}" for folder in folders)
        )
