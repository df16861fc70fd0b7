"""What the sender knows of its members: who is there, who wants what, and who may have it.

Only the sender's thread touches it. A receiver is sent to when it is connected, says that it is
ready, and its request is in the log.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.frames import Frame
from rlstreams.workers.weights.members import LoggedRequest, Member, ReceivedFrame

ASKED_KEPT = 1024


class Membership:
    """Members and their requests."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._asked: dict[tuple[str, int], str] = {}  # worker, by receiver and version

    def ask(self, event: LoggedRequest) -> None:
        """A request stands in the log."""
        self._asked[event.receiver, event.policy_version] = event.worker
        if len(self._asked) > ASKED_KEPT:
            del self._asked[next(iter(self._asked))]

    def hear(self, event: ReceivedFrame) -> None:
        """What a member said, or that its link ended."""
        member, frame = event.member, event.frame
        if frame is None:
            self.remove(member, event.reason)
            return
        try:
            self._apply(member, frame)
        except (KeyError, TypeError, ValueError) as err:
            self.remove(member, f"it says {str(frame)[:80]!r}: {err!r}")

    def _apply(self, member: Member, frame: Frame) -> None:
        if frame["type"] == "layout":
            member.layout = json.dumps(frame["parameters"])
            member.rows()  # or it raises
            member.mode, member.ranks = str(frame["mode"]), int(frame["ranks"])
            member.engine = str(frame["engine"])
            member.gpu = str(frame.get("gpu", ""))
            self.members.append(member)
        elif frame["type"] == "ready":
            member.wants, member.since_s = int(frame["policy_version"]), time.monotonic()
            member.tries = 0
        else:
            member.answers[str(frame["group"])] = frame
            if frame["type"] == "loaded":
                # Here and not later: its next request may follow at once.
                member.settled, member.wants = member.wants, None

    def remove(self, member: Member, reason: str) -> None:
        """Cut its link."""
        member.gone = member.gone or reason
        member.link.close()
        if member in self.members:
            self.members.remove(member)

    def lacking(self, version: int) -> list[Member]:
        """Who neither got `version`, or a newer one, nor was refused it."""
        return [m for m in self.members if m.settled is None or m.settled < version]

    def has_asked(self, member: Member, version: int) -> bool:
        """Whether its worker's request stands in the log."""
        return bool(self._asked_by(member, version))

    def ready(self) -> list[Member]:
        """Who may be sent to, oldest request first."""
        able = []
        for member in self.members:
            if member.wants is not None:
                member.worker = self._asked_by(member, member.wants)
                able += [member] if member.worker else []
        return sorted(able, key=lambda member: member.since_s)

    def _asked_by(self, member: Member, version: int) -> str:
        return self._asked.get((member.hello.receiver.partition(".")[0], version), "")


def apart(first: Member, others: Iterable[Member]) -> list[Member]:
    """`first`, and of the others at most one on each GPU: NCCL has one rank of a group on each."""
    chosen = [first]
    taken = {first.gpu}
    for member in others:
        if member is not first and (not member.gpu or member.gpu not in taken):
            chosen.append(member)
            taken.add(member.gpu)
    return chosen


def tell(member: Member, frame: Frame) -> None:
    """Send; a member that takes nothing is gone, which its own thread will say too."""
    try:
        member.link.send(frame)
    except PullError as err:
        member.gone = member.gone or str(err)


def refuse(member: Member, kind: str, error: str) -> None:
    """It gets nothing, and why."""
    member.settled, member.wants = member.wants, None
    tell(member, {"type": "refused", "kind": kind, "error": error})
