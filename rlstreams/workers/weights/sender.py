"""The sender: one thread that decides on versions, receivers and groups, and drops dead members.

Receivers that want the same bytes within a window (`Membership.window_left_s`) share a broadcast. A
group is kept while its members stay. A failed transfer is aborted: members that answer are retried
at once, the others are named and disconnected. So a dead member costs the others one deadline, and
usually far less, because its death closes its link.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.frames import Frame
from rlstreams.workers.weights.link.group import gpu_of
from rlstreams.workers.weights.link.ipc import IPC
from rlstreams.workers.weights.members import Listener, Member
from rlstreams.workers.weights.membership import Membership, apart
from rlstreams.workers.weights.snapshot import Snapshots
from rlstreams.workers.weights.transfer import (
    BrokenError,
    Groups,
    Transfer,
    prepared,
)

if TYPE_CHECKING:
    import torch

MAX_TRIES = 4
ABORT_GRACE_S = 3.0
IDLE_S = 1.0
LOOK_EVERY_S = 0.001


class IncidentLog(Protocol):
    """Log for incidents."""

    def info(self, event: str, **fields: object) -> None:
        """Log an event worth knowing."""

    def warning(self, event: str, **fields: object) -> None:
        """Log the loss of a member or a transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderDeadlines:
    """Deadlines of the sender, seconds."""

    window_s: float = 0.05  # pullers that become ready within it share one broadcast
    form_s: float = 30.0  # to form a group
    stall_s: float = 20.0  # a broadcast without progress


@dataclass(frozen=True, slots=True)
class _Withdrawal:
    """Request to serve nothing once all members have the newest version, or it is `until_s`."""

    until_s: float
    done: threading.Event


class Sender:
    """Runs from `start` until `close`. Calls from other threads run one by one in its thread."""

    def __init__(
        self,
        backend: str,
        device: torch.device,
        snapshots: Snapshots,
        limits: SenderDeadlines,
        log: IncidentLog,
    ) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._device = device
        self._snapshots = snapshots
        self._limits = limits
        self._log = log
        self._membership = Membership()
        self._backend = backend
        self._groups = Groups(device, limits.stall_s)
        self._form_s = self._send_s = 0.0  # durations of the last forming and sending
        self._stopping = False
        self._withdrawal: _Withdrawal | None = None
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)

    def start(self, listener: Listener) -> None:
        """Begin to send to the members that the listener admits."""
        self._listener = listener
        self._thread.start()

    def check(self) -> None:
        """Check that the sender still runs, or has not begun.

        Raises:
            WeightError: its thread ended with an error, which the log holds; no member would be
                served any more.
        """
        has_begun = self._thread.ident is not None
        if has_begun and not self._thread.is_alive() and not self._stopping:
            raise WeightError("the sender of weights ended with an error; it stands in the log")

    def ask(self, receiver: str, policy_version: int, worker: str) -> None:
        """Note the log's request: a receiver is ready for a version."""
        self._calls.put(partial(self._membership.ask, receiver, policy_version, worker))

    def hear(self, member: Member, frame: Frame | None, reason: str) -> None:
        """Take a member's frame; None: its link ended, for `reason`."""
        self._calls.put(partial(self._heard, member, frame, reason))

    def withdraw(self, hold_s: float) -> None:
        """Wait until every member has the newest version, or for `hold_s`; then serve no version.

        Raises:
            WeightError: a transfer stands beyond all deadlines, and the sender still holds
                versions.
        """
        request = _Withdrawal(time.monotonic() + hold_s, threading.Event())
        self._calls.put(partial(setattr, self, "_withdrawal", request))
        limits = self._limits
        longest_s = hold_s + MAX_TRIES * (limits.form_s + 2 * limits.stall_s)
        until_s = time.monotonic() + longest_s
        while self._thread.is_alive() and not request.done.wait(IDLE_S):
            if time.monotonic() > until_s:
                raise WeightError(
                    f"versions {self._snapshots.versions()} are still being sent {longest_s:g} s "
                    "after the trainer was through"
                )
        self._snapshots.retire(0)  # no transfer is under way any more

    def close(self) -> None:
        """End a transfer under way; idempotent."""
        self._calls.put(partial(setattr, self, "_stopping", True))
        if self._thread.is_alive():
            self._thread.join(2 * ABORT_GRACE_S)

    def _run(self) -> None:
        while not self._stopping:
            self._take(self._patience_s())
            if (transfer := self._due()) is not None:
                self._send(transfer)
                self._snapshots.give_back(transfer.snapshot)
            self._try_withdraw()
        self._finish_withdrawal()
        self._groups.close()
        for member in list(self._membership.members):
            self._membership.remove(member, "the trainer ends")

    def _take(self, wait_s: float) -> None:
        """Run the calls that are queued, or the first that comes."""
        while True:
            try:
                call = self._calls.get(timeout=wait_s) if wait_s else self._calls.get_nowait()
            except queue.Empty:
                return
            wait_s = 0.0
            call()

    def _heard(self, member: Member, frame: Frame | None, reason: str) -> None:
        if frame is None:
            self._membership.remove(member, reason)
            return
        self._membership.hear(member, frame)
        if frame.get("type") == "layout":
            self._log.info("puller_joined", puller=member.label)

    def _look(self) -> None:
        """Run calls in the middle of a transfer.

        Raises:
            BrokenError: the trainer ends.
        """
        self._take(0.0)
        if self._stopping:
            raise BrokenError("the trainer ends")

    def _patience_s(self) -> float:
        """Seconds until the next window ends."""
        if ready := self._membership.ready():
            return self._window_left_s(ready)
        return IDLE_S if self._withdrawal is None else LOOK_EVERY_S

    def _window_left_s(self, ready: list[Member]) -> float:
        took_s = self._form_s + self._send_s
        return self._membership.window_left_s(ready, self._limits.window_s, took_s)

    def _try_withdraw(self) -> None:
        """End a withdrawal that is due; called between two transfers."""
        if self._withdrawal is None:
            return
        versions = self._snapshots.versions()
        lacking = self._membership.lacking(versions[-1]) if versions else []
        if lacking and time.monotonic() < self._withdrawal.until_s:
            return
        for member in lacking:
            self._log.warning(
                "puller_not_awaited", policy_version=versions[-1], puller=member.label
            )
        self._finish_withdrawal()

    def _finish_withdrawal(self) -> None:
        if self._withdrawal is not None:
            self._snapshots.retire(0)  # before another member asks
            self._withdrawal.done.set()
            self._withdrawal = None

    def _due(self) -> Transfer | None:
        """The oldest request with all that want the same bytes, once its window is over."""
        while ready := self._membership.ready():
            if self._window_left_s(ready) > 0.0:
                return None
            if (transfer := self._transfer(ready)) is not None:
                return transfer
        return None

    def _transfer(self, ready: list[Member]) -> Transfer | None:
        """The transfer to the oldest ready member, and to those that share it; None: refused."""
        oldest = ready[0]
        version = oldest.wants
        assert version is not None
        snapshot = self._snapshots.lease(version)
        if snapshot is None:
            held = self._snapshots.versions()
            oldest.refuse("gone", f"policy version {version} is no longer served, only {held}")
            return None
        plans = {}
        for member in ready:
            if member.wants != version:
                continue
            try:
                kind = member.layout, member.mode, member.hello.rank, member.ranks
                plans[member] = prepared(snapshot.layout, *kind)
            except PullError as err:
                member.refuse(err.kind, str(err))
                self._log.warning("puller_refused", puller=member.label, error=str(err))
        if oldest not in plans:
            self._snapshots.give_back(snapshot)
            return None
        backend = self._backend_of(oldest)
        same = [
            member
            for member in plans
            if plans[member].wire == plans[oldest].wire
            and self._backend_of(member) == self._backend
        ]
        together = apart(oldest, same) if backend == self._backend else [oldest]
        order = sorted(together, key=lambda m: (m.hello.receiver, m.hello.rank))
        sent = {member: plans[member] for member in order}
        return Transfer(version, snapshot, sent, self._look, self._limits.stall_s, backend)

    def _backend_of(self, member: Member) -> str:
        """NCCL sends from one GPU to another; on one card CUDA IPC does, or else host memory."""
        if not member.gpu or member.gpu != gpu_of(self._device):
            return self._backend
        return "gloo" if member.has_no_ipc else IPC

    def _send(self, transfer: Transfer) -> None:
        """Try a transfer once; members that are alive after a broken one stay ready."""
        num_members = len(self._membership.members)
        group_id, group, is_new = self._groups.get(transfer.members, num_members, transfer.backend)
        started_s, formed_s = time.monotonic(), 0.0
        try:
            transfer.begin(group_id, group, self._listener, self._limits.form_s, is_new=is_new)
            formed_s = time.monotonic()
            transfer.send(group, self._device)
            sent_s = time.monotonic()
            transfer.await_answers()
        except BrokenError as err:
            self._abort(transfer, err, was_formed=formed_s > 0)
            return
        self._settle(transfer, "")
        if transfer.backend != self._backend:
            self._free_staged()
        self._form_s = formed_s - started_s if is_new else self._form_s
        self._send_s = sent_s - formed_s
        self._log.info(
            "weights_sent",
            policy_version=transfer.policy_version,
            receivers=len(transfer.members),
            num_bytes=transfer.num_bytes,
            form_s=round(formed_s - started_s, 4),
            send_s=round(sent_s - formed_s, 4),
        )

    @staticmethod
    def _free_staged() -> None:
        """Free the staging memory, which a receiver on the same card needs."""
        import torch

        torch.cuda.empty_cache()

    def _abort(self, transfer: Transfer, error: BrokenError, *, was_formed: bool) -> None:
        """Abort a transfer, and wait for members to confirm that they heard of it."""
        reason = str(error)
        version = transfer.policy_version
        self._log.warning("transfer_broken", policy_version=version, reason=reason)
        self._groups.drop(transfer.members, reason)
        if transfer.backend == IPC and not was_formed:
            self._log.warning("no_cuda_ipc", puller=transfer.members[0].label, instead="gloo")
            transfer.members[0].has_no_ipc = True
        until_s = time.monotonic() + ABORT_GRACE_S
        while transfer.silent() and time.monotonic() < until_s and not self._stopping:
            self._take(LOOK_EVERY_S)
        for member in transfer.silent():
            member.gone = f"{reason}; no answer to an abort within {ABORT_GRACE_S:g} s"
        self._settle(transfer, reason)

    def _settle(self, transfer: Transfer, reason: str) -> None:
        """Name and cut off members that left or failed; those that others failed may try again."""
        for member in transfer.members:
            answer = member.answers.pop(transfer.group_id, {"type": "left"})
            member.tries += 1
            if answer["type"] == "loaded":
                continue
            if member.gone or answer.get("kind") != "link":
                lost = member.gone or str(answer.get("error"))
                self._log.warning("puller_lost", puller=member.label, reason=lost)
                self._membership.remove(member, lost)
            elif member.tries >= MAX_TRIES:
                member.refuse("link", f"{member.tries} transfers broke, the last: {reason}")
