"""`rlstreams up` in which every role dies once at each of some crash points, one after another.

Called with the configuration and the overrides of `up`; prints where somebody died, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

from rlstreams.streams.log.bus import Bus
from rlstreams.up.supervisor.fault_hook import EndedRun, FaultTargets, UpOptions
from rlstreams.up.supervisor.summary import show
from rlstreams.up.supervisor.up import up
from rlstreams.workers.config.load import load
from tests.chaos.plan import ROLES, points_of

PREFIXES = ("commit", "offsets")


class EachPoint:
    """A `FaultHook`: arms each process of a role's first worker with the next point."""

    def enter(self, targets: FaultTargets) -> None:
        """See `FaultHook`."""
        self._fleet = targets.fleet
        for role in ROLES:
            points = [point for point in points_of(role) if point.startswith(PREFIXES)]
            (worker, *_) = targets.fleet.of(role)
            worker.crash_at += [f"{point}:{number % 3 + 1}" for number, point in enumerate(points)]

    def tick(self, *, is_running: bool) -> None:
        """See `FaultHook`."""

    def conclude(self, bus: Bus, ended: EndedRun, status: int) -> int:
        """See `FaultHook`."""
        assert ended.audit is not None
        audit, exits = ended.audit, self._fleet.exits
        died = Counter(end.died_at.partition(":")[0] for end in exits if end.died_at)
        show(json.dumps({"died": died, "lost": audit.lost, "trained_twice": audit.trained_twice}))
        return status


if __name__ == "__main__":
    config = load(sys.argv[1:2], sys.argv[2:])
    options = UpOptions(config=config, command="up", is_resumed=False, is_live=False)
    sys.exit(up(options, EachPoint()))
