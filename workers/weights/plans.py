"""Plans by receiver, made once per layout; equal bytes are found whatever the names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple

from workers.weights.link.mapping import Plan, make_plan
from workers.weights.link.target import Row
from workers.weights.members import Member


class Planner:
    """Remembers the plan of each kind of receiver."""

    def __init__(self) -> None:
        self._plans: dict[str, tuple[Plan, str]] = {}

    def plan(self, sources: Sequence[Row], member: Member) -> tuple[Plan, str]:
        """The member's plan, and a name for the bytes that it makes.

        Raises:
            PullError: the layouts do not match; names both sides.
        """
        rank = member.hello.rank
        asked = [sources, member.parameters, member.mode, rank, member.ranks]
        key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        if key not in self._plans:
            made = make_plan(
                sources, member.parameters, mode=member.mode, rank=rank, ranks=member.ranks
            )
            plan = in_wire_order(made)
            self._plans[key] = (plan, wire_of(plan))
        return self._plans[key]


def in_wire_order(plan: Plan) -> Plan:
    """By source, not by the server's names: engines that hold the same bytes share a broadcast."""
    pairs = sorted(
        zip(plan.pieces, plan.parts, strict=True), key=lambda pair: (astuple(pair[1]), pair[0].name)
    )
    return Plan(tuple(piece for piece, _ in pairs), tuple(part for _, part in pairs))


def wire_of(plan: Plan) -> str:
    """A name for the bytes of a plan."""
    rows = [
        [astuple(part), piece.dtype] for piece, part in zip(plan.pieces, plan.parts, strict=True)
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
