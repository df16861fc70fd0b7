"""How long a broadcast waits for others that could share it.

Whoever is ready stands still meanwhile, so only those are awaited who would really share: who are
connected, lack the version, want the same bytes, and are on another GPU. One whose request stands
in the log is about to be ready. For it the wait may last as long as a broadcast of its own would
take, the forming of another group included: so waiting never costs more than twice what knowing
would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.members import Member
from rlstreams.workers.weights.membership import Membership
from rlstreams.workers.weights.plans import Planner
from rlstreams.workers.weights.snapshot import Snapshots

PATIENCE_S = 2.0  # at most, for one that asked and does not get ready


class Window:
    """Knows what the last broadcast took."""

    def __init__(
        self, window_s: float, membership: Membership, planner: Planner, snapshots: Snapshots
    ) -> None:
        """Args: window_s: for those who have not asked."""
        self._window_s = window_s
        self._membership = membership
        self._planner = planner
        self._snapshots = snapshots
        self._form_s = 0.0
        self._send_s = 0.0

    def took(self, form_s: float | None, send_s: float) -> None:
        """A broadcast was made; `form_s` is None where its group stood already."""
        self._form_s = self._form_s if form_s is None else form_s
        self._send_s = send_s

    def left_s(self, oldest: Member, ready: Sequence[Member]) -> float:
        """From now; at most 0 if nobody is awaited, or for long enough."""
        version = oldest.wants
        assert version is not None
        awaited = [
            member
            for member in self._membership.lacking(version)
            if member not in ready and self._would_share(oldest, member, version)
        ]
        if not awaited:
            return 0.0
        window_s = self._window_s
        if any(self._membership.has_asked(member, version) for member in awaited):
            window_s = max(window_s, min(self._form_s + self._send_s, PATIENCE_S))
        return oldest.since_s + window_s - time.monotonic()

    def _would_share(self, oldest: Member, other: Member, version: int) -> bool:
        if other.gpu and other.gpu == oldest.gpu:
            return False
        layout = self._snapshots.layout_of(version)
        if layout is None:
            return False
        try:
            wanted, offered = (self._planner.plan(layout, member) for member in (oldest, other))
        except PullError:  # one of them is refused in its turn
            return False
        return wanted.wire == offered.wire
