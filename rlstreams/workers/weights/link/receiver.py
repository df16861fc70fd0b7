"""The receiver: asks for a version, is given a group and a plan, takes the bytes, checks them.

While bytes are under way it also looks at its link, so it learns at once of an abort, or of a
sender that died. After an abort it waits for the sender's next try, until its own deadline.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .checksum import Checksum
from .errors import PullError
from .frames import Connection, Frame, dial
from .group import Pending, TransferGroup, gpu_of
from .handshake import Hello, introduce
from .ipc import Crossing, IpcGroup, make_group
from .pieces import Piece, batches, from_rows
from .rendezvous import LinkStore
from .side_streams import SideStreams
from .target import Target, rows_of

HANDSHAKE_S = 5.0
AHEAD = 4  # batches under way
LOOK_EVERY_S = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of the sender, and identity of the receiver."""

    address: str  # host:port
    backend: str  # "gloo" or "nccl"
    receiver: str
    key: str
    epoch: int
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Facts of a received version, whose checksum was right."""

    num_bytes: int
    checksum: str
    receive_s: float  # of the transfer that succeeded
    join_s: float  # connecting, and forming the group


class Receiver:
    """A standing link to one sender. Belongs to one thread."""

    def __init__(
        self, address: Address, device: torch.device, *, engine: str, mode: str = "in_place"
    ) -> None:
        self.address = address
        self.mode = mode
        self._device = device
        self._engine = engine
        self._link: Connection | None = None
        self._groups: dict[str, TransferGroup | IpcGroup] = {}
        self._join_s = 0.0

    def receive(self, policy_version: int, target: Target, until_s: float) -> Received:
        """Ask for the version and take it.

        Args:
            until_s: on the monotonic clock.

        Raises:
            PullError: not received; gives the reason; see `Target.touched`.
        """
        try:
            return self._receive(policy_version, target, until_s)
        except BaseException:  # closes the link, so that the sender does not wait for us
            self.close()
            raise

    def close(self) -> None:
        """Leave link and groups; idempotent."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        for group_id in list(self._groups):
            self._forget(group_id)

    def _receive(self, policy_version: int, target: Target, until_s: float) -> Received:
        started_s = time.monotonic()
        link = self._joined(target, until_s)
        self._join_s = time.monotonic() - started_s
        link.send({"type": "ready", "policy_version": policy_version})
        while True:
            frame = link.receive(until_s)
            if frame["type"] == "refused":
                raise PullError(str(frame["kind"]), str(frame["error"]))
            group_id = str(frame["group"])
            if frame["type"] != "transfer":  # about a group that was given up
                self._forget(group_id)
                continue
            try:
                received = self._take(link, frame, target, until_s)
            except PullError as err:
                self._forget(group_id)
                said = {"group": group_id, "kind": err.kind, "error": str(err)}
                link.send({"type": "failed"} | said)
                if err.kind != "link":
                    raise
            else:
                link.send({"type": "loaded", "group": group_id})
                return received

    def _joined(self, target: Target, until_s: float) -> Connection:
        if self._link is None:
            link = self._dial("member", until_s)
            said = {"engine": self._engine, "mode": self.mode, "gpu": gpu_of(self._device)}
            rows = {"ranks": self.address.ranks, "parameters": rows_of(target.tensors)}
            link.send({"type": "layout"} | said | rows)
            self._link = link
        return self._link

    def _dial(self, purpose: str, until_s: float) -> Connection:
        until_s = min(until_s, time.monotonic() + HANDSHAKE_S)
        link = dial(self.address.address, until_s)
        own = self.address
        hello = Hello(receiver=own.receiver, rank=own.rank, epoch=own.epoch, purpose=purpose)
        try:
            introduce(link, hello, own.key, until_s)
        except PullError:
            link.close()
            raise
        return link

    def _take(self, link: Connection, frame: Frame, target: Target, until_s: float) -> Received:
        watch = _Watch(link, str(frame["group"]), until_s)
        pieces = from_rows(frame["pieces"])
        for piece in pieces:  # a piece that does not fit is found before anything is touched
            if piece.place == "parameter":
                target.buffer(piece)
        group = self._group(link, frame, watch)
        target.expect(pieces)
        started_s = time.monotonic()
        target.touched = True
        checksum = self._receive_pieces(pieces, group, target, watch)
        watch.until(lambda: watch.sent is not None)
        if checksum != watch.sent:
            raise PullError(
                "checksum", f"{link.peer} sent bytes of checksum {watch.sent}, {checksum} came"
            )
        target.check_filled()
        target.touched = False
        return Received(
            num_bytes=sum(piece.num_bytes for piece in pieces),
            checksum=checksum,
            receive_s=time.monotonic() - started_s,
            join_s=self._join_s,
        )

    def _receive_pieces(
        self,
        pieces: Sequence[Piece],
        group: TransferGroup | IpcGroup,
        target: Target,
        watch: _Watch,
    ) -> str:
        streams = SideStreams(self._device)
        checksum = Checksum()
        under_way: deque[tuple[Sequence[Piece], list[torch.Tensor], Pending | Crossing]] = deque()

        def settle() -> None:
            batch, buffers, pending = under_way.popleft()
            watch.until(pending.done)
            with streams.summing():
                checksum.add(buffers)
            target.took(batch, buffers)

        for batch in batches(pieces):
            with streams.moving():
                buffers = [target.buffer(piece) for piece in batch]
                under_way.append((batch, buffers, group.broadcast(buffers)))
            if len(under_way) > AHEAD:
                settle()
        while under_way:
            settle()
        streams.finish()
        target.synchronize()
        with streams.summing():
            return checksum.hexdigest()

    def _group(self, link: Connection, frame: Frame, watch: _Watch) -> TransferGroup | IpcGroup:
        group_id = str(frame["group"])
        if group_id in self._groups:
            return self._groups[group_id]
        started_s = time.monotonic()
        until_s = started_s + float(frame["form_s"])
        store_link = self._dial(f"group/{group_id}", until_s)
        backend = str(frame.get("backend") or self.address.backend)
        group = make_group(backend, self._device, stall_s=float(frame["stall_s"]))
        try:
            store = LinkStore(store_link, until_s)
            rank, size = int(frame["rank"]), int(frame["size"])
            group.form(store, rank, size, host=link.local_host, until_s=until_s, look=watch.look)
        finally:
            store_link.close()
        self._groups[group_id] = group
        self._join_s += time.monotonic() - started_s
        return group

    def _forget(self, group_id: str) -> None:
        group = self._groups.pop(group_id, None)
        if group is not None:
            group.abort()


class _Watch:
    """A wait that also looks at the link and the clock between looks at the device."""

    def __init__(self, link: Connection, group_id: str, until_s: float) -> None:
        self._link = link
        self._group_id = group_id
        self._until_s = until_s
        self.sent: str | None = None  # the sender's checksum

    def look(self) -> None:
        """Look once.

        Raises:
            PullError: the sender has ended, or abandoned the group (it may form another one), or
                the time is up.
        """
        frame = self._link.poll()
        if frame is not None and frame.get("group") == self._group_id:
            if frame["type"] == "abort":
                raise PullError("link", str(frame["error"]))
            if frame["type"] == "sent":
                self.sent = str(frame["checksum"])
        if time.monotonic() > self._until_s:
            raise PullError("deadline", f"{self._link.peer} did not send all in time")

    def until(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`; raises as `look`."""
        while not done():
            self.look()
            time.sleep(LOOK_EVERY_S)
