"""The channels `gloo` and `nccl`: one broadcast to all ready pullers, from a snapshot.

One code path for both; the transport and the device differ. The trainer's end listens on one named
interface, and only once its claim holds. A worker's end receives into memory next to the old
weights; model servers receive in place, by orders (infra/server/README.md).
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
from rlstreams.workers.weights.layout import manifest_of, parse_layout, weight_hash
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.handshake import receiver_key
from rlstreams.workers.weights.members import Listener
from rlstreams.workers.weights.sender import IncidentLog, Sender, SenderDeadlines
from rlstreams.workers.weights.snapshot import Snapshots

if TYPE_CHECKING:
    import torch

    from rlstreams.workers.weights.link.receiver import Receiver


def device_of(backend: str) -> torch.device:
    """The device of a backend's bytes: the host's memory for gloo, this process's GPU for NCCL."""
    import torch

    if backend == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class CollectiveWeightServer:
    """The trainer's end; see `WeightServer`."""

    def __init__(
        self,
        backend: str,
        *,
        host: str,
        secret: str,
        log: IncidentLog,
        limits: SenderDeadlines | None = None,
        place: str = "auto",
        device: torch.device | None = None,
    ) -> None:
        """Nothing listens before `open`.

        Args:
            host: address of the one interface to listen on.
            secret: the run's; pullers prove that they know it.
            place: of snapshots, `weights.snapshot`.
        """
        if backend == "nccl":
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as in model servers
        device = device or device_of(backend)
        self._backend = backend
        self._host = host
        self._secret = secret
        self._log = log
        self._snapshots = Snapshots(device, place)
        self._sender = Sender(backend, device, self._snapshots, limits or SenderDeadlines(), log)
        self._listener: Listener | None = None

    def open(self, epoch: int) -> None:
        """Listen for pullers of `epoch`.

        Raises:
            WeightError: the host is no address of this machine.
        """
        try:
            self._listener = Listener(
                self._host,
                epoch,
                lambda receiver: receiver_key(self._secret, receiver),
                self._sender.hear,
                lambda error: self._log.warning("puller_refused", error=error),
            )
        except OSError as err:
            raise WeightError(f"weights.host {self._host!r} cannot be listened on: {err}") from err
        self._sender.start(self._listener)

    def publish(
        self,
        policy_version: int,
        weights: Mapping[str, torch.Tensor],
        known_hash: str | None = None,
    ) -> WeightManifest:
        """Copy the weights and serve them; see `WeightServer.publish`.

        Raises:
            WeightError: also if the sender has failed.
        """
        self._sender.check()
        manifest = manifest_of(policy_version, weights, known_hash)
        held, content = self._snapshots.hash_of(policy_version), manifest.weight_hash
        if held is None:
            self._snapshots.take(policy_version, content, weights)
        else:
            refuse_other(policy_version, held, content)
        return manifest

    def endpoints(self) -> Sequence[Endpoint]:
        """The listener's address; none before `open`."""
        if self._listener is None:
            return ()
        return (Endpoint(channel=self._backend, address=self._listener.address),)

    def serve(self, request: PullRequested) -> None:
        """Let the receiver have the version, as the log asks; raises as `publish` does."""
        self._sender.check()
        if request.channel == self._backend:
            self._sender.ask(request.address, request.policy_version, request.worker)

    def versions(self) -> Sequence[int]:
        """Versions that can be pulled, oldest first."""
        return self._snapshots.versions()

    def finish(self, deadline_s: float) -> None:
        """Wait until all connected receivers have the newest version; see `WeightServer`."""
        self._sender.withdraw(deadline_s)

    def retire(self, keep: int) -> None:
        """Stop serving all but the newest `keep`; a version that is being sent still arrives."""
        self._snapshots.retire(keep)

    def close(self) -> None:
        """End transfers, and accept no further link; idempotent."""
        if self._listener is not None:
            self._listener.close()
            self._sender.close()


class CollectiveWeightChannel:
    """A worker's end; see `WeightChannel`."""

    def __init__(self, backend: str, secret: str) -> None:
        self.name = backend
        self._secret = secret
        self._id = secrets.token_hex(8)
        self._receiver: Receiver | None = None
        self._pulling = threading.Lock()

    def can_pull(self, published: PolicyPublished) -> bool:
        """Whether the version has an endpoint of this channel; the server may still refuse."""
        return any(end.channel == self.name for end in published.endpoints)

    def address(self) -> str:
        """This receiver's name: the trainer sends to receivers that the log names."""
        return self._id

    def order(
        self, published: PolicyPublished, deadline_s: float, *, server: str = ""
    ) -> dict[str, object]:
        """The order for a model server; see `WeightChannel.order`."""
        receiver = f"{self._id}.{server}" if server else self._id
        return order_of(
            published,
            deadline_s,
            channel=self.name,
            address=addresses_of(published, self.name)[0],
            receiver=receiver,
            key=receiver_key(self._secret, receiver),
        )

    def pull(
        self, published: PolicyPublished, deadline_s: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in name order, received beside the old ones; see `WeightChannel`."""
        from rlstreams.workers.weights.link.target import FreshTensors

        until_s = time.monotonic() + deadline_s
        fresh = FreshTensors(parse_layout(published.layout), device_of(self.name))
        version = published.policy_version
        # A link serves one pull at a time, and a worker of several servers pulls for each.
        if not self._pulling.acquire(timeout=deadline_s):
            raise WeightError(
                f"policy version {version} over {self.name}: another pull of this worker "
                f"was not over within {deadline_s:g} s"
            )
        try:
            self._receiver_of(published).receive(version, fresh, until_s)
        except PullError as err:
            kind = VersionGoneError if err.kind == "gone" else WeightError
            raise kind(f"policy version {version} over {self.name}: {err}") from err
        finally:
            self._pulling.release()
        if (found := weight_hash(fresh.tensors)) != published.weight_hash:
            raise WeightError(
                f"policy version {version} over {self.name} was published with hash "
                f"{published.weight_hash}, what came has {found}"
            )
        yield from sorted(fresh.tensors.items())

    def close(self) -> None:
        """Leave the groups; idempotent."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _receiver_of(self, published: PolicyPublished) -> Receiver:
        """The standing link, or a new one where the trainer or its epoch changed."""
        from rlstreams.workers.weights.link.receiver import Address, Receiver

        address = Address(
            address=addresses_of(published, self.name)[0],
            backend=self.name,
            receiver=self._id,
            key=receiver_key(self._secret, self._id),
            epoch=published.epoch,
        )
        if self._receiver is None or self._receiver.address != address:
            self.close()
            self._receiver = Receiver(address, device_of(self.name), engine="builtin")
        return self._receiver
