"""The groups that a sender keeps: one per set of members, made when first needed.

Ranks of one server want different bytes, so each has a group of its own, and they take turns: fewer
groups than members would mean that each is formed anew for each version.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlstreams.workers.weights.link.group import Group
from rlstreams.workers.weights.members import Member
from rlstreams.workers.weights.membership import tell

if TYPE_CHECKING:
    import torch

GROUPS_KEPT = 4  # at least
KEPT_BY_MEMBER = 2

Key = tuple[Member, ...]


class Groups:
    """Least recently used ones beyond what is kept go."""

    def __init__(self, backend: str, device: torch.device, stall_s: float) -> None:
        self._backend = backend
        self._device = device
        self._stall_s = stall_s
        self._kept: dict[Key, tuple[str, Group]] = {}

    def get(self, members: Sequence[Member], connected: int) -> tuple[str, Group, bool]:
        """Id, group, and whether it must be formed first.

        Args:
            members: in the order of their ranks.
            connected: how many members there are in all.
        """
        key = tuple(members)
        self._drop_broken()
        is_new = key not in self._kept
        kept = self._kept.pop(key, None)
        if kept is None:
            group = Group(self._backend, self._device, stall_s=self._stall_s)
            kept = (secrets.token_hex(8), group)
        self._kept[key] = kept
        while len(self._kept) > max(GROUPS_KEPT, KEPT_BY_MEMBER * connected):
            self.drop(next(iter(self._kept)), "made room")
        return (*kept, is_new)

    def drop(self, key: Key, reason: str) -> None:
        """Abort it, and have its members do the same."""
        group_id, group = self._kept.pop(key)
        for member in key:
            if not member.gone:
                tell(member, {"type": "abort", "group": group_id, "error": reason})
        group.abort()

    def close(self) -> None:
        """Drop all."""
        for key in list(self._kept):
            self.drop(key, "the trainer ends")

    def _drop_broken(self) -> None:
        for key in [key for key in self._kept if any(member.gone for member in key)]:
            self.drop(key, "a member left")
