"""Plans by receiver, made once per layout; equal bytes are found whatever the names."""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass

from rlstreams.workers.weights.layout import parse_layout
from rlstreams.workers.weights.link.mapping import Plan, make_plan
from rlstreams.workers.weights.link.pieces import Piece, batches, digest, to_rows
from rlstreams.workers.weights.link.shards import Part
from rlstreams.workers.weights.members import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan with what each transfer needs of it."""

    name: str  # of the plan
    wire: str  # of its bytes: equal for plans that differ in the server's names only
    rows: list[list[object]]  # pieces as the receiver is told them
    batches: list[list[tuple[Piece, Part]]]
    num_bytes: int


class Planner:
    """Remembers the plan of each kind of receiver."""

    def __init__(self) -> None:
        self._plans: dict[tuple[object, ...], Prepared] = {}

    def plan(self, layout: str, member: Member) -> Prepared:
        """The member's plan for weights of this layout.

        Raises:
            PullError: the layouts do not match; names both sides.
        """
        rank, ranks = member.hello.rank, member.ranks
        key = (layout, member.layout, member.mode, rank, ranks)
        if key not in self._plans:
            sources = [(n, d, s) for n, (d, s) in parse_layout(layout).items()]
            made = make_plan(sources, member.rows(), mode=member.mode, rank=rank, ranks=ranks)
            self._plans[key] = prepared(made)
        return self._plans[key]


def prepared(plan: Plan) -> Prepared:
    """Ordered by source, not by the server's names, so that engines can share a broadcast."""
    pairs = sorted(
        zip(plan.pieces, plan.parts, strict=True), key=lambda pair: (astuple(pair[1]), pair[0].name)
    )
    pieces = [piece for piece, _ in pairs]
    part_of = dict(pairs)
    wire = json.dumps([[astuple(part), piece.dtype] for piece, part in pairs])
    return Prepared(
        name=digest(pieces),
        wire=hashlib.sha256(wire.encode()).hexdigest()[:16],
        rows=to_rows(pieces),
        batches=[[(piece, part_of[piece]) for piece in batch] for batch in batches(pieces)],
        num_bytes=sum(piece.num_bytes for piece in pieces),
    )
