"""One broadcast of one version to one set of members, from the first byte to their answers.

Every wait calls `look`, which reads the members' messages; a member that left or failed ends the
transfer at once, one that hangs ends it at the deadline.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from rlstreams.workers.weights.layout import parse_layout, parse_rows
from rlstreams.workers.weights.link.checksum import Checksum
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.group import Pending, TransferGroup
from rlstreams.workers.weights.link.ipc import IPC, Crossing, IpcGroup, make_group
from rlstreams.workers.weights.link.mapping import Plan, make_plan
from rlstreams.workers.weights.link.pieces import batches
from rlstreams.workers.weights.link.receiver import AHEAD, LOOK_EVERY_S
from rlstreams.workers.weights.link.side_streams import SideStreams
from rlstreams.workers.weights.members import Listener, Member
from rlstreams.workers.weights.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

GROUPS_KEPT = 4  # at least
KEPT_BY_MEMBER = 2


class BrokenError(Exception):
    """The transfer did not reach all members; gives the observed reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan with the facts that each transfer by it needs."""

    wire: str  # hash of its bytes: equal for plans that differ in the server's names only
    rows: list[list[object]]  # pieces as the receiver gets them
    batches: list[Plan]
    num_bytes: int


@lru_cache(maxsize=64)  # kinds of receivers
def prepared(layout: str, parameters: str, mode: str, rank: int, ranks: int) -> Prepared:
    """The plan for weights of this layout to a receiver that has these parameters.

    Ordered by source, not by the server's names, so that engines can share a broadcast.

    Raises:
        PullError: the layouts do not match; names both sides.
    """
    sources, targets = parse_layout(layout), parse_rows(parameters)
    plan = make_plan(sources, targets, mode=mode, rank=rank, ranks=ranks)
    part_of = dict(sorted(plan, key=lambda pair: (astuple(pair[1]), pair[0].name)))
    wire = json.dumps([[astuple(part), piece.dtype] for piece, part in part_of.items()])
    return Prepared(
        wire=hashlib.sha256(wire.encode()).hexdigest(),
        rows=[list(astuple(piece)) for piece in part_of],
        batches=[[(piece, part_of[piece]) for piece in batch] for batch in batches(list(part_of))],
        num_bytes=sum(piece.num_bytes for piece in part_of),
    )


class Groups:
    """The groups that a sender keeps: one per set of members, made when first needed.

    Ranks of one server want different bytes, so each has a group of its own, and they are sent to
    one after the other: fewer groups than members would mean that each is formed anew for each
    version. The least recently used groups beyond the limit are dropped.
    """

    def __init__(self, device: torch.device, stall_s: float) -> None:
        self._device = device
        self._stall_s = stall_s
        self._kept: dict[tuple[Member, ...], tuple[str, TransferGroup | IpcGroup]] = {}

    def get(
        self, members: Sequence[Member], connected: int, backend: str
    ) -> tuple[str, TransferGroup | IpcGroup, bool]:
        """Id and group, and whether it must be formed first.

        Args:
            members: in the order of their ranks.
            connected: number of all members.
        """
        for broken in [key for key in self._kept if any(member.gone for member in key)]:
            self.drop(broken, "a member left")
        key = tuple(members)
        kept = self._kept.pop(key, None)
        is_new = kept is None
        if kept is None:
            group = make_group(backend, self._device, stall_s=self._stall_s)
            kept = (secrets.token_hex(8), group)
        self._kept[key] = kept
        while len(self._kept) > max(GROUPS_KEPT, KEPT_BY_MEMBER * connected):
            self.drop(next(iter(self._kept)), "made room")
        return (*kept, is_new)

    def drop(self, members: Sequence[Member], reason: str) -> None:
        """Abort a group, and have its members do the same."""
        group_id, group = self._kept.pop(tuple(members))
        for member in members:
            if not member.gone:
                member.send({"type": "abort", "group": group_id, "error": reason})
        group.abort()

    def close(self) -> None:
        """Drop all groups."""
        for key in list(self._kept):
            self.drop(key, "the trainer ends")


class Transfer:
    """One try of a broadcast.

    Args:
        plans: of each member, in the order of their ranks, from 1; equal but for names.
    """

    def __init__(
        self,
        policy_version: int,
        snapshot: Snapshot,
        plans: Mapping[Member, Prepared],
        look: Callable[[], None],
        stall_s: float,
        backend: str,
    ) -> None:
        self.backend = backend
        self.policy_version = policy_version
        self.snapshot = snapshot
        self.members = list(plans)
        self.group_id = ""
        self._plans = plans
        self._plan = next(iter(plans.values()))
        self._look = look
        self._stall_s = stall_s
        self._until_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes that each member receives."""
        return self._plan.num_bytes

    def begin(
        self,
        group_id: str,
        group: TransferGroup | IpcGroup,
        listener: Listener,
        form_s: float,
        *,
        is_new: bool,
    ) -> None:
        """Send each member its group, rank and plan; a new group's members meet.

        Raises:
            BrokenError: not all came.
        """
        self.group_id = group_id
        self._until_s = time.monotonic() + form_s
        if not is_new:
            self._announce(form_s)
            return
        with listener.rendezvous(group_id, form_s) as store:
            self._announce(form_s)
            try:
                group.form(
                    store,
                    0,
                    1 + len(self.members),
                    host=listener.host,
                    until_s=self._until_s,
                    look=self._check,
                )
            except PullError as err:
                raise BrokenError(str(err)) from err

    def _announce(self, form_s: float) -> None:
        for rank, (member, plan) in enumerate(self._plans.items(), start=1):
            member.answers.pop(self.group_id, None)
            frame = {
                "type": "transfer",
                "group": self.group_id,
                "rank": rank,
                "size": 1 + len(self.members),
                "form_s": form_s,
                "stall_s": self._stall_s,
                "backend": self.backend,
                "pieces": plan.rows,
            }
            member.send(frame)

    def send(self, group: TransferGroup | IpcGroup, device: torch.device) -> None:
        """Broadcast all pieces, and send the members their checksum.

        Raises:
            BrokenError: a member left, failed, or did not progress until the deadline.
        """
        self._progress()
        streams = SideStreams(device)
        checksum = Checksum()
        ahead = 0 if self.backend == IPC else AHEAD  # staged pieces take room on a shared card
        under_way: deque[tuple[list[torch.Tensor], Pending | Crossing]] = deque()

        def settle() -> None:
            tensors, pending = under_way.popleft()
            while not pending.done():
                self._check()
                time.sleep(LOOK_EVERY_S)
            self._progress()
            with streams.summing(tensors):
                checksum.add(tensors)

        try:
            for batch in self._plan.batches:
                with streams.moving():
                    tensors = [self.snapshot.bytes_of(piece, part) for piece, part in batch]
                    under_way.append((tensors, group.broadcast(tensors)))
                if len(under_way) > ahead:
                    settle()
            while under_way:
                settle()
        except (PullError, RuntimeError) as err:  # torch's: the device has no room to stage a piece
            raise BrokenError(str(err)) from err
        with streams.summing():
            found = checksum.hexdigest()
        for member in self.members:
            member.send({"type": "sent", "group": self.group_id, "checksum": found})

    def await_answers(self) -> None:
        """Wait until every member has loaded the version, failed or left.

        Raises:
            BrokenError: a member does not answer, or the trainer ends.
        """
        self._progress()
        while self.silent():
            self._look()
            if time.monotonic() > self._until_s:
                raise BrokenError(f"no answer within {self._stall_s:g} s after the last byte")
            time.sleep(LOOK_EVERY_S)

    def silent(self) -> list[Member]:
        """Members that have neither left nor answered."""
        return [m for m in self.members if not m.gone and self.group_id not in m.answers]

    def _check(self) -> None:
        self._look()
        for member in self.members:
            if member.gone:
                raise BrokenError(f"{member.label} left: {member.gone}")
            if self.group_id in member.answers:
                raise BrokenError(f"{member.label}: {member.answers[self.group_id].get('error')}")
        if time.monotonic() > self._until_s:
            raise BrokenError(f"it stood still for {self._stall_s:g} s")

    def _progress(self) -> None:
        self._until_s = time.monotonic() + self._stall_s
