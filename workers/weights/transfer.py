"""One broadcast of one version to one set of members, from the first byte to their answers.

Everything that waits calls `look`, which reads the members' messages; a member that left or failed
ends the transfer at once, one that hangs ends it at the deadline.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlstreams.workers.weights.link.checksum import Checksum
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.group import Group, Pending
from rlstreams.workers.weights.link.receiver import AHEAD
from rlstreams.workers.weights.link.rendezvous import KeyValueStore, LocalStore
from rlstreams.workers.weights.link.side_streams import SideStreams
from rlstreams.workers.weights.link.watch import LOOK_EVERY_S
from rlstreams.workers.weights.members import Member
from rlstreams.workers.weights.membership import tell
from rlstreams.workers.weights.plans import Prepared
from rlstreams.workers.weights.snapshot import Snapshot

if TYPE_CHECKING:
    import torch


class BrokenError(Exception):
    """The transfer did not reach everyone; says what was seen."""


class SilentError(BrokenError):
    """All was sent, and somebody does not say that it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What is sent to whom. Plans differ in names only: `wire` is equal for all."""

    policy_version: int
    snapshot: Snapshot
    wire: str
    plans: dict[Member, Prepared]

    @property
    def members(self) -> Sequence[Member]:
        """In the order of their ranks, from 1."""
        return list(self.plans)

    @property
    def num_bytes(self) -> int:
        """Of one copy."""
        return next(iter(self.plans.values())).num_bytes


class Transfer:
    """One try."""

    def __init__(
        self, group_id: str, delivery: Delivery, look: Callable[[], None], stall_s: float
    ) -> None:
        self._group_id = group_id
        self._delivery = delivery
        self._look = look
        self._stall_s = stall_s
        self._until_s = time.monotonic() + stall_s

    def announce(self, form_s: float) -> None:
        """Tell each member its group, rank and plan."""
        size = 1 + len(self._delivery.plans)
        for rank, (member, plan) in enumerate(self._delivery.plans.items(), start=1):
            frame = {
                "type": "transfer",
                "group": self._group_id,
                "policy_version": self._delivery.policy_version,
                "rank": rank,
                "size": size,
                "form_s": form_s,
                "stall_s": self._stall_s,
                "plan": plan.name,
            }
            if plan.name not in member.plans:
                frame["pieces"] = plan.rows
                member.plans.add(plan.name)
            tell(member, frame)

    def form(self, group: Group, values: KeyValueStore, host: str, form_s: float) -> None:
        """Meet the members.

        Raises:
            BrokenError: not all came.
        """
        self._until_s = time.monotonic() + form_s
        size = 1 + len(self._delivery.plans)
        store, until_s = LocalStore(values), self._until_s
        try:
            group.form(store, 0, size, host=host, until_s=until_s, look=self._check)
        except PullError as err:
            raise BrokenError(str(err)) from err
        self._progress()

    def send(self, group: Group, device: torch.device) -> str:
        """Broadcast all pieces; returns their checksum, and has told it to the members.

        Raises:
            BrokenError: somebody left, failed, or held it up beyond the deadline.
        """
        snapshot, wire = self._delivery.snapshot, self._delivery.wire
        streams = SideStreams(device)
        checksum = None if wire in snapshot.checksums else Checksum()
        under_way: deque[tuple[list[torch.Tensor], Pending]] = deque()

        def settle() -> None:
            tensors, pending = under_way.popleft()
            self._until(pending.done)
            self._progress()
            if checksum is not None:
                with streams.summing(tensors):
                    checksum.add(tensors)

        try:
            for batch in next(iter(self._delivery.plans.values())).batches:
                with streams.moving():
                    tensors = [snapshot.bytes_of(piece, part) for piece, part in batch]
                    under_way.append((tensors, group.broadcast(tensors)))
                if len(under_way) > AHEAD:
                    settle()
            while under_way:
                settle()
        except (PullError, RuntimeError) as err:  # torch's: the device has no room to stage it
            raise BrokenError(str(err)) from err
        if checksum is not None:
            with streams.summing():
                snapshot.checksums[wire] = checksum.hexdigest()
        for member in self._delivery.members:
            said = {"group": self._group_id, "checksum": snapshot.checksums[wire]}
            tell(member, {"type": "sent"} | said)
        return snapshot.checksums[wire]

    def await_answers(self) -> None:
        """Until every member loaded it, failed or left.

        Raises:
            SilentError: somebody says nothing.
            BrokenError: the trainer ends.
        """
        members = self._delivery.members
        self._progress()
        while any(not m.gone and self._group_id not in m.answers for m in members):
            self._look()
            if time.monotonic() > self._until_s:
                raise SilentError(f"no answer within {self._stall_s:g} s after the last byte")
            time.sleep(LOOK_EVERY_S)

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._check()
            time.sleep(LOOK_EVERY_S)

    def _check(self) -> None:
        self._look()
        for member in self._delivery.members:
            if member.gone:
                raise BrokenError(f"{member.label} left: {member.gone}")
            if self._group_id in member.answers:
                raise BrokenError(f"{member.label}: {member.answers[self._group_id].get('error')}")
        if time.monotonic() > self._until_s:
            raise BrokenError(f"it stood still for {self._stall_s:g} s")

    def _progress(self) -> None:
        self._until_s = time.monotonic() + self._stall_s
