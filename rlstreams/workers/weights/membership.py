"""Members of a sender, as it knows them: requests, the order to serve them in, and when.

Only the sender's thread touches it. A receiver is sent to when it is connected, has reported that
it is ready, and its request is in the log.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence

from rlstreams.workers.weights.layout import parse_rows
from rlstreams.workers.weights.link.frames import Frame
from rlstreams.workers.weights.members import Member

ASKED_KEPT = 1024
PATIENCE_S = 2.0  # longest wait for a member that asked but does not get ready


class Membership:
    """Members and their requests."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._asked: dict[tuple[str, int], str] = {}  # worker, by receiver and version

    def ask(self, receiver: str, version: int, worker: str) -> None:
        """Note a request that stands in the log."""
        self._asked[receiver, version] = worker
        if len(self._asked) > ASKED_KEPT:
            del self._asked[next(iter(self._asked))]

    def hear(self, member: Member, frame: Frame) -> None:
        """Take a member's frame; a member that sends an unknown one is cut off."""
        try:
            self._apply(member, frame)
        except (KeyError, TypeError, ValueError) as err:
            self.remove(member, f"it says {str(frame)[:80]!r}: {err!r}")

    def _apply(self, member: Member, frame: Frame) -> None:
        if frame["type"] == "layout":
            member.layout = json.dumps(frame["parameters"])
            parse_rows(member.layout)  # or it raises
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
        """Cut a member's link, and forget it."""
        member.gone = member.gone or reason
        member.link.close()
        if member in self.members:
            self.members.remove(member)

    def lacking(self, version: int) -> list[Member]:
        """Members that neither got `version`, or a newer one, nor were refused it."""
        return [m for m in self.members if m.settled is None or m.settled < version]

    def ready(self) -> list[Member]:
        """Members that may be sent to, oldest request first."""
        able = []
        for member in self.members:
            if member.wants is not None:
                member.worker = self._asked_by(member, member.wants)
                able += [member] if member.worker else []
        return sorted(able, key=lambda member: member.since_s)

    def window_left_s(self, ready: Sequence[Member], window_s: float, took_s: float) -> float:
        """Seconds that the broadcast to the first of `ready` still waits for others that may share
        it.

        A ready member stands still meanwhile. So the wait is only for members that are connected,
        lack the version and are on another GPU; and for `took_s` if one of them has its request in
        the log, because it is about to be ready: so waiting never costs more than twice the best
        choice.

        Args:
            window_s: wait for members that have not asked.
            took_s: time of a broadcast of its own, with the forming of a group.
        """
        oldest = ready[0]
        assert oldest.wants is not None
        awaited = apart(oldest, (m for m in self.lacking(oldest.wants) if m not in ready))[1:]
        if not awaited:
            return 0.0
        if any(self._asked_by(member, oldest.wants) for member in awaited):
            window_s = max(window_s, min(took_s, PATIENCE_S))
        return max(0.0, oldest.since_s + window_s - time.monotonic())

    def _asked_by(self, member: Member, version: int) -> str:
        return self._asked.get((member.hello.receiver.partition(".")[0], version), "")


def apart(first: Member, others: Iterable[Member]) -> list[Member]:
    """`first`, and at most one other on each GPU: NCCL takes one rank of a group on each."""
    chosen = [first]
    taken = {first.gpu}
    for member in others:
        if member is not first and (not member.gpu or member.gpu not in taken):
            chosen.append(member)
            taken.add(member.gpu)
    return chosen
