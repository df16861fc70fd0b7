"""Scaling of a live run: `control` asks for a number of workers of a role, the fleet follows.

The consumer group deals the partitions: an added worker takes some over, one that leaves hands its
own on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.topic_plan import SHARED
from rlstreams.up.supervisor.fleet import GRACE_S, Fleet
from rlstreams.workers.config.run import RunConfig


def partitions_of(bus: Bus) -> dict[str, int]:
    """Numbers of partitions of the topics that workers share, by topic."""
    return {topic.name: bus.partitions(topic.name) for topic in SHARED.values()}


def problem(config: RunConfig, role: str, number: int, partitions: Mapping[str, int]) -> str:
    """Why a live run cannot have so many workers of a role; "": it can.

    Args:
        partitions: see `partitions_of`.
    """
    asked = f"{role}={number}"
    if role not in SHARED:
        return f"{asked}: {' and '.join(SHARED)} are scaled; of {role} a run has what it began with"
    if number < 1:
        return f"{asked}: a run needs one {role} worker; `rlstreams control pause` lets it rest"
    topic = SHARED[role].name
    if number > partitions[topic]:
        return (
            f"{asked}: {topic} has {partitions[topic]} partitions, and no more workers get work; "
            "broker.headroom of a new run says how many it has"
        )
    if role == "rollout" and config.is_served:
        return (
            f"{asked}: rollout.engine is {config.rollout.engine!r}, and `up` dealt its model "
            "servers when it began: have a worker join with its own (`rlstreams worker rollout "
            "--join`), or drain the run and go on with --resume and rollout.workers"
        )
    if (device := config.shared_device(role)) is not None:
        return f"{asked}: {role} shares device {device.name!r} in shifts, one process a role"
    return ""


class Scale:
    """Has the fleet follow the numbers that were asked for. `tick` often; it never waits.

    Args:
        is_taken: whether a worker of this name is there, ours or not.
    """

    def __init__(
        self,
        config: RunConfig,
        fleet: Fleet,
        bus: Bus,
        *,
        is_taken: Callable[[str], bool],
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._partitions = partitions_of(bus)
        self._is_taken = is_taken
        self._say = say
        self._done: dict[str, int] = {}  # by role, the number asked for that is decided

    def tick(self, wanted: Mapping[str, int]) -> None:
        """Follow the numbers that are new."""
        for role, number in wanted.items():
            if self._done.get(role) != number:
                self._done[role] = number
                if why := problem(self._config, role, number, self._partitions):
                    self._say(f"not scaled: {why}")
                else:
                    self._follow(role, number)

    def _follow(self, role: str, number: int) -> None:
        staying = [one for one in self._fleet.of(role) if one.leaves_by_s is None]
        limit_s = self._config.deadlines.drain_s + GRACE_S
        gone = staying[number:]
        for worker in gone:
            self._fleet.retire(worker, limit_s)
        # A number that is being left is free once its process has ended.
        known = {one.name for one in self._fleet.of(role)}
        free = (n for n in count() if f"{role}-{n}" not in known)
        added = [
            self._fleet.add(role, next(n for n in free if not self._is_taken(f"{role}-{n}"))).name
            for _ in range(number - len(staying))
        ]
        lists = {"comes": added, "leaves": [worker.name for worker in gone]}
        changed = [f"{does} {', '.join(names)}" for does, names in lists.items() if names]
        self._say(f"{role} is scaled to {number}: {'; '.join(changed) or 'as it is'}")
