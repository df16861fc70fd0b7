"""Members of a group and how its partitions are shared out: pure state, without a lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlstreams.streams.log.record import Committed, Partition


@dataclass(slots=True)
class Member:
    """One consumer. `owned` is what it was told at its last poll."""

    partitions: Sequence[Partition]  # of all topics that it subscribed to
    owned: set[Partition] = field(default_factory=set)


@dataclass(slots=True)
class Group:
    """A partition has one owner at a time: it is given on only after its owner let it go."""

    committed: dict[Partition, Committed] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)  # by order of joining
    _joined: int = 0

    def join(self, partitions: Sequence[Partition]) -> int:
        """Add a member: its id."""
        self._joined += 1
        self.members[self._joined] = Member(partitions)
        return self._joined

    def leave(self, member_id: int) -> None:
        """Remove a member; without effect for one that is gone."""
        self.members.pop(member_id, None)

    def targets(self) -> Mapping[Partition, int]:
        """The member that each partition should go to: in turn, over the sorted partitions."""
        wanted = sorted({p for member in self.members.values() for p in member.partitions})
        targets: dict[Partition, int] = {}
        for turn, partition in enumerate(wanted):
            ids = [i for i, m in self.members.items() if partition in m.partitions]
            targets[partition] = ids[turn % len(ids)]
        return targets

    def revocations(self, member_id: int) -> frozenset[Partition]:
        """What the member must let go."""
        targets = self.targets()
        owned = self.members[member_id].owned
        return frozenset(p for p in owned if targets.get(p) != member_id)

    def grants(self, member_id: int) -> Sequence[Partition]:
        """What the member may take now: its target, as far as no other member has it."""
        taken = {p for member in self.members.values() for p in member.owned}
        return [p for p, owner in self.targets().items() if owner == member_id and p not in taken]
