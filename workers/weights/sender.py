"""The sender: one thread that decides who gets which version, grouped how, and drops dead members.

Receivers that want the same bytes within a window (`window.py`) share one broadcast. A group is
kept while its members stay. A failed transfer is aborted: members that answer are retried at once,
the others are named and disconnected. So a dead member costs the others one deadline, and usually
far less, because its death closes its link.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.groups import Groups
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.group import gpu_of
from rlstreams.workers.weights.link.rendezvous import KeyValueStore
from rlstreams.workers.weights.members import Event, Listener, LoggedRequest, Member, Withdraw
from rlstreams.workers.weights.membership import Membership, apart, refuse
from rlstreams.workers.weights.plans import Planner, Prepared
from rlstreams.workers.weights.snapshot import Snapshots
from rlstreams.workers.weights.transfer import BrokenError, Delivery, SilentError, Transfer
from rlstreams.workers.weights.window import Window

if TYPE_CHECKING:
    import torch

MAX_TRIES = 4
ABORT_GRACE_S = 3.0
IDLE_S = 1.0
LOOK_EVERY_S = 0.001


class Log(Protocol):
    """Where incidents are told."""

    def info(self, event: str, **fields: object) -> None:
        """Worth knowing."""

    def warning(self, event: str, **fields: object) -> None:
        """Somebody is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long anything may take, seconds."""

    window_s: float = 0.05  # in which others join a broadcast
    form_s: float = 30.0  # a group
    stall_s: float = 20.0  # a broadcast without progress


class Sender:
    """Runs from `start` until `close`."""

    def __init__(
        self, backend: str, device: torch.device, snapshots: Snapshots, limits: Limits, log: Log
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._device = device
        self._snapshots = snapshots
        self._limits = limits
        self._log = log
        self._planner = Planner()
        self._membership = Membership()
        self._window = Window(limits.window_s, self._membership, self._planner, snapshots)
        self._groups = Groups(backend, device, limits.stall_s)
        self._stopping = False
        self._withdrawal: Withdraw | None = None
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)

    def start(self, listener: Listener) -> None:
        """Begin to send to whom the listener lets in."""
        self._listener = listener
        self._thread.start()

    def check(self) -> None:
        """Whether it still sends, or has not begun.

        Raises:
            WeightError: its thread ended with an error, which the log holds; nobody would be served
                any more.
        """
        has_begun = self._thread.ident is not None
        if has_begun and not self._thread.is_alive() and not self._stopping:
            raise WeightError("the sender of weights ended with an error; it stands in the log")

    def withdraw(self, hold_s: float) -> None:
        """Until every member has the newest version, or for `hold_s`; then no version is served.

        Raises:
            WeightError: the sender does not let go of it: a transfer stands beyond all deadlines.
        """
        request = Withdraw(time.monotonic() + hold_s, threading.Event())
        self.events.put(request)
        limits = self._limits
        longest_s = hold_s + MAX_TRIES * (limits.form_s + 2 * limits.stall_s)
        until_s = time.monotonic() + longest_s
        while self._thread.is_alive() and not request.done.wait(IDLE_S):
            if time.monotonic() > until_s:
                raise WeightError(
                    f"versions {self._snapshots.versions()} are still being sent {longest_s:g} s "
                    "after the trainer wanted to change their weights"
                )
        self._snapshots.retire(0)  # nobody sends any more

    def close(self) -> None:
        """End what is under way; idempotent."""
        self.events.put(None)
        if self._thread.is_alive():
            self._thread.join(2 * ABORT_GRACE_S)

    def _run(self) -> None:
        while not self._stopping:
            self._take(self._patience_s())
            delivery = self._due()
            if delivery is not None:
                self._deliver(delivery)
                self._snapshots.give_back(delivery.snapshot)
            self._try_withdraw()
        self._finish_withdrawal()
        self._groups.close()
        for member in list(self._membership.members):
            self._membership.remove(member, "the trainer ends")

    def _take(self, wait_s: float) -> None:
        """Events that are there, or the first that comes."""
        while True:
            try:
                event = self.events.get(timeout=wait_s) if wait_s else self.events.get_nowait()
            except queue.Empty:
                return
            wait_s = 0.0
            if event is None:
                self._stopping = True
            elif isinstance(event, LoggedRequest):
                self._membership.ask(event)
            elif isinstance(event, Withdraw):
                self._withdrawal = event
            else:
                self._membership.hear(event)
                if event.frame is not None and event.frame["type"] == "layout":
                    self._log.info("puller_joined", puller=event.member.label)

    def _look(self) -> None:
        """In the middle of a transfer.

        Raises:
            BrokenError: the trainer ends.
        """
        self._take(0.0)
        if self._stopping:
            raise BrokenError("the trainer ends")

    def _patience_s(self) -> float:
        """Until the next window ends."""
        ready = self._membership.ready()
        if not ready:
            return IDLE_S if self._withdrawal is None else LOOK_EVERY_S
        return max(0.0, self._window.left_s(ready[0], ready))

    def _try_withdraw(self) -> None:
        """Here nothing is under way: between two deliveries."""
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
            self._snapshots.retire(0)  # before somebody else asks
            self._withdrawal.done.set()
            self._withdrawal = None

    def _due(self) -> Delivery | None:
        """The oldest request with all that want the same bytes, once its window is over."""
        ready = self._membership.ready()
        for oldest in ready:
            if self._window.left_s(oldest, ready) > 0.0:
                return None
            delivery = self._delivery(oldest, ready)
            if delivery is not None:
                return delivery
        return None

    def _delivery(self, oldest: Member, ready: list[Member]) -> Delivery | None:
        """What to send with `oldest`; None if it is refused."""
        version = oldest.wants
        assert version is not None
        snapshot = self._snapshots.lease(version)
        if snapshot is None:
            held = self._snapshots.versions()
            refuse(oldest, "gone", f"policy version {version} is no longer served, only {held}")
            return None
        plans: dict[Member, Prepared] = {}
        for member in ready:
            if member.wants != version:
                continue
            try:
                self._check_gpu(member)
                plans[member] = self._planner.plan(snapshot.layout, member)
            except PullError as err:
                refuse(member, err.kind, str(err))
                self._log.warning("puller_refused", puller=member.label, error=str(err))
        if oldest not in plans:
            self._snapshots.give_back(snapshot)
            return None
        wire = plans[oldest].wire
        same = {member: plan for member, plan in plans.items() if plan.wire == wire}
        order = sorted(
            apart(oldest, same), key=lambda member: (member.hello.receiver, member.hello.rank)
        )
        return Delivery(
            policy_version=version,
            snapshot=snapshot,
            wire=wire,
            plans={member: same[member] for member in order},
        )

    def _check_gpu(self, member: Member) -> None:
        """NCCL would find out too late, and break the others' transfer."""
        if member.gpu and member.gpu == gpu_of(self._device):
            raise PullError(
                "refused",
                f"{member.label} is on the trainer's own GPU {member.gpu}, and NCCL sends from one "
                "GPU to another: give it another one (logprob.device, or CUDA_VISIBLE_DEVICES of a "
                "model server in engine.env), or pull over another channel",
            )

    def _deliver(self, delivery: Delivery) -> None:
        """One try; who is alive after a broken one stays ready."""
        group_id, group, is_new = self._groups.get(delivery.members, len(self._membership.members))
        started_s = time.monotonic()
        transfer = Transfer(group_id, delivery, self._look, self._limits.stall_s)
        store = KeyValueStore(started_s + self._limits.form_s)
        for member in delivery.members:
            member.answers.pop(group_id, None)
        try:
            if is_new:
                self._listener.stores[group_id] = store
            transfer.announce(self._limits.form_s)
            if is_new:
                transfer.form(group, store, self._listener.host, self._limits.form_s)
            formed_s = time.monotonic()
            transfer.send(group, self._device)
            sent_s = time.monotonic()
            transfer.await_answers()
        except BrokenError as err:
            store.close(str(err))
            self._listener.stores.pop(group_id, None)
            self._recover(delivery, group_id, err)
            return
        self._listener.stores.pop(group_id, None)
        self._settle(delivery, group_id)
        self._window.took(formed_s - started_s if is_new else None, sent_s - formed_s)
        self._log.info(
            "weights_sent",
            policy_version=delivery.policy_version,
            receivers=len(delivery.members),
            num_bytes=delivery.num_bytes,
            form_s=round(formed_s - started_s, 4),
            send_s=round(sent_s - formed_s, 4),
        )

    def _settle(self, delivery: Delivery, group_id: str) -> None:
        """Everyone has answered, or is gone."""
        for member in delivery.members:
            answer = member.answers.pop(group_id, {"type": "left", "error": member.gone})
            if answer["type"] != "loaded":
                self._lose(member, str(answer.get("error")))

    def _recover(self, delivery: Delivery, group_id: str, error: BrokenError) -> None:
        """Abort; wait for the living to say so; name the others."""
        reason = str(error)
        self._log.warning("transfer_broken", policy_version=delivery.policy_version, reason=reason)
        self._groups.drop(tuple(delivery.members), reason)
        grace_s = 0.0 if isinstance(error, SilentError) else ABORT_GRACE_S
        until_s = time.monotonic() + grace_s
        silent = [m for m in delivery.members if not m.gone and group_id not in m.answers]
        while silent and time.monotonic() < until_s and not self._stopping:
            self._take(LOOK_EVERY_S)
            silent = [m for m in silent if not m.gone and group_id not in m.answers]
        for member in silent:
            self._lose(member, f"{reason}; no answer to an abort within {grace_s:g} s")
        for member in delivery.members:
            answer = member.answers.pop(group_id, {})
            member.tries += 1
            if answer.get("type") == "loaded":
                continue
            if member.gone:
                if member not in silent:
                    self._lose(member, member.gone)
            elif answer.get("type") == "failed" and answer.get("kind") != "link":
                self._lose(member, str(answer["error"]))
            elif member.tries >= MAX_TRIES:
                refuse(member, "link", f"{member.tries} transfers broke, the last: {reason}")

    def _lose(self, member: Member, reason: str) -> None:
        self._log.warning("puller_lost", puller=member.label, reason=reason)
        self._membership.remove(member, reason)
