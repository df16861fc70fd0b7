"""The `WeightChannel` and `WeightServer` interfaces: the persistent link that carries weights.

Topics carry events, the channel carries tensors. Also known as weight sync, weight transfer, refit
or broadcast. Protocol (decision 0024): `PolicyPublished` announces a version; a worker that is
ready answers `PullRequested`; the server sends; the worker checks the hash and confirms with
`PolicyLoaded` before it takes work. The trainer never waits for a worker that does not answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlstreams.schemas.events import Endpoint, PolicyPublished, PullRequested
from rlstreams.workers.weights.link import PROTOCOL

if TYPE_CHECKING:
    import torch


STORE = "store"  # the channel that is served beside another: its endpoints come with `PolicyStored`
BY_HASH, BY_TRANSFER = "weight_hash", "transfer"  # the checks that a receiver made


class WeightError(Exception):
    """Weights that cannot be served or received; names version, both sides and the difference."""


class VersionGoneError(WeightError):
    """The version is no longer served; the message names the range that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """A server's offer under one version number."""

    policy_version: int
    weight_hash: str
    num_bytes: int
    layout: str  # JSON: [[name, dtype, shape], ...] in sending order


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A finished pull."""

    policy_version: int
    weight_hash: str
    num_bytes: int
    seconds: float
    paused_s: float  # seconds without generation
    verified: str = BY_HASH  # or BY_TRANSFER: see `PolicyLoaded`


class WeightServer(Protocol):
    """The trainer's end. Works on its own; the trainer never waits for a receiver."""

    def open(self, epoch: int) -> None:
        """Serve workers of this epoch from now on; called once the trainer's claim is committed."""

    def publish(
        self,
        policy_version: int,
        weights: Mapping[str, torch.Tensor],
        known_hash: str | None = None,
    ) -> WeightManifest:
        """Take a snapshot and serve it. The same version with the same content is a no-op.

        Args:
            known_hash: the weights' hash where the trainer has it; else it is computed.

        Raises:
            WeightError: the number was published before with another content.
        """

    def endpoints(self) -> Sequence[Endpoint]:
        """Addresses that workers pull from."""

    def serve(self, request: PullRequested) -> None:
        """Send the version to a ready worker, or refuse with the range held; returns soon."""

    def versions(self) -> Sequence[int]:
        """Versions that can be pulled, oldest first."""

    def finish(self, deadline_s: float) -> None:
        """Wait at the end of the run until every connected receiver has the last version.

        Returns at once where versions outlive the trainer; else after `deadline_s` at the latest.

        Raises:
            WeightError: a transfer does not end.
        """

    def retire(self, keep: int) -> None:
        """Stop serving all but the newest `keep` versions."""

    def close(self) -> None:
        """Stop serving; idempotent."""


class WeightSource(Protocol):
    """A source of weights for an engine of this process."""

    def pull(
        self, published: PolicyPublished, deadline_s: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in sending order, on the channel's device.

        The iterator ends only when every byte came and the hash of all equals
        `published.weight_hash`; until then the received tensors are void.

        Raises:
            VersionGoneError: no longer served.
            WeightError: the deadline passed, the link broke, layout or hash differ.
        """


class WeightChannel(WeightSource, Protocol):
    """A worker's end."""

    @property
    def name(self) -> str:
        """`file`, `gloo`, `nccl` or `store`: matched against the endpoints of a version."""

    def can_pull(self, published: PolicyPublished) -> bool:
        """Whether this channel has an endpoint of the version, and finds it still served."""

    def address(self) -> str:
        """This receiver's name in `PullRequested`; empty where that has no meaning."""

    def order(
        self, published: PolicyPublished, deadline_s: float, *, server: str = ""
    ) -> dict[str, object]:
        """The order for a model server to pull the version: JSON, by infra/server/README.md.

        Args:
            server: name of one of the worker's servers; each is a receiver of its own.

        Raises:
            WeightError: no endpoint of this channel, or no longer served.
        """


def refuse_other(policy_version: int, had: str, new: str) -> None:
    """Return if the version was published with the same content.

    Args:
        had, new: hash of the content, or the file that is named by it.

    Raises:
        WeightError: it was published with another one.
    """
    if had != new:
        raise WeightError(
            f"policy version {policy_version} was published as {had}; it cannot become {new}"
        )


def addresses_of(published: PolicyPublished, channel: str) -> list[str]:
    """Addresses at which a version is served over this channel.

    Raises:
        WeightError: none; names the channels that serve it.
    """
    found = [end.address for end in published.endpoints if end.channel == channel]
    if not found:
        offered = sorted({end.channel for end in published.endpoints})
        raise WeightError(
            f"policy version {published.policy_version} has no endpoint of channel {channel!r}, "
            f"only of {offered}"
        )
    return found


def order_of(
    published: PolicyPublished,
    deadline_s: float,
    *,
    channel: str,
    address: str,
    receiver: str,
    key: str = "",
) -> dict[str, object]:
    """The fields of an order, by infra/server/README.md; see `WeightChannel.order`.

    Args:
        address: of the weights, for the receiver.
        key: for the receiver's authentication; empty where none is asked for.
    """
    return {
        "rlstreams": PROTOCOL,
        "channel": channel,
        "address": address,
        "receiver": receiver,
        "key": key,
        "epoch": published.epoch,
        "policy_version": published.policy_version,
        "weight_hash": published.weight_hash,
        "layout": published.layout,
        "deadline_s": deadline_s,
    }
