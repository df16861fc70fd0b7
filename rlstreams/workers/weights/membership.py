"""What the sender knows of its members: who is there, who wants what, who may have it, and when.

Only the sender's thread touches it. A receiver is sent to when it is connected, says that it is
ready, and its request is in the log.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence

from rlstreams.workers.weights.link.frames import Frame
from rlstreams.workers.weights.members import Member, parse_rows

ASKED_KEPT = 1024
PATIENCE_S = 2.0  # at most, for one that asked and does not get ready


class Membership:
    """Members and their requests."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._asked: dict[tuple[str, int], str] = {}  # worker, by receiver and version

    def ask(self, receiver: str, version: int, worker: str) -> None:
        """A request stands in the log."""
        self._asked[receiver, version] = worker
        if len(self._asked) > ASKED_KEPT:
            del self._asked[next(iter(self._asked))]

    def hear(self, member: Member, frame: Frame) -> None:
        """What a member said; one that says what nobody understands is cut off."""
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
        """Cut its link."""
        member.gone = member.gone or reason
        member.link.close()
        if member in self.members:
            self.members.remove(member)

    def lacking(self, version: int) -> list[Member]:
        """Who neither got `version`, or a newer one, nor was refused it."""
        return [m for m in self.members if m.settled is None or m.settled < version]

    def ready(self) -> list[Member]:
        """Who may be sent to, oldest request first."""
        able = []
        for member in self.members:
            if member.wants is not None:
                member.worker = self._asked_by(member, member.wants)
                able += [member] if member.worker else []
        return sorted(able, key=lambda member: member.since_s)

    def window_left_s(self, ready: Sequence[Member], window_s: float, took_s: float) -> float:
        """How long the broadcast to the first of `ready` waits yet for others that may share it.

        Whoever is ready stands still meanwhile. So only those are awaited who are connected, lack
        the version and are on another GPU; and one whose request stands in the log, which is about
        to be ready, for `took_s`: so waiting never costs more than twice what knowing would.

        Args:
            window_s: for those who have not asked.
            took_s: what a broadcast of its own would take, the forming of a group included.
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
    """`first`, and of the others at most one on each GPU: NCCL has one rank of a group on each."""
    chosen = [first]
    taken = {first.gpu}
    for member in others:
        if member is not first and (not member.gpu or member.gpu not in taken):
            chosen.append(member)
            taken.add(member.gpu)
    return chosen
