"""What the audit's ledger notes of the samples of a step, and what it will not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlstreams.schemas.events import SampleRef
from rlstreams.streams.audit.ledger import Ledger
from rlstreams.streams.audit.report import Breaches
from rlstreams.streams.audit.table import NOWHERE, TRAINED, Table, place_of
from tests.factories import sample_ref, step_completed, trainer_started
from tests.unit.streams.audit_log import CONFIG

INT32 = (1 << 31) - 1


class Folded:
    """A ledger that took a claim and these steps."""

    def __init__(self, *steps: tuple[SampleRef, ...]) -> None:
        self.table, self.breaches = Table(), Breaches()
        self.ledger = Ledger(self.breaches, self.table)
        self.ledger.apply(trainer_started(config=CONFIG))
        for step, refs in enumerate(steps, 1):
            event = step_completed(step, samples=refs, masked=(), absent=())
            self.ledger.apply(event)

    def found(self) -> list[tuple[str, str]]:
        """Kind and id of each breach, in order."""
        return [(str(breach.kind), breach.id) for breach in self.breaches.kept]

    def trained(self) -> dict[str, tuple[int, int]]:
        """Place and oldest version of each sample that is noted."""
        table = self.table
        slots = [slot for slot, flags in enumerate(table.flags) if flags & TRAINED]
        return {table.name(slot): (table.used_at[slot], table.oldest[slot]) for slot in slots}


def of_group(group_id: str, *offsets: int, partition: int = 0) -> tuple[SampleRef, ...]:
    return tuple(
        sample_ref(group_id, sample, partition=partition, offset=offset)
        for sample, offset in enumerate(offsets)
    )


def test_each_sample_is_noted_where_its_step_found_it() -> None:
    """Siblings need not be neighbours, nor lie in one partition."""
    first, second = of_group("3", 7, 5, 6), of_group("4", 9, 8, partition=2)
    moved = replace(first[2], partition=1)
    refs = (first[1], second[1], moved, second[0], first[0])
    folded = Folded(refs)
    assert not folded.found()
    assert folded.trained() == {
        f"{ref.group_id}/{ref.sample}": (place_of(ref.partition, ref.offset), 2) for ref in refs
    }
    assert folded.ledger.fresh == [place_of(ref.partition, ref.offset) for ref in refs]


@pytest.mark.parametrize(
    ("changes", "breaches"),
    [
        ({"group_id": ""}, [("bad id", "")]),
        ({"group_id": "seven"}, [("bad id", "seven")]),
        ({"group_id": "e0-7"}, [("bad id", "e0-7")]),
        ({"sample": -1}, [("bad id", "3/-1")]),
        ({"sample": -5, "group_id": "9"}, [("bad id", "9/-5")]),
        ({"sample": -1, "group_id": ""}, [("bad id", "")]),
        ({"sample": 1 << 16, "group_id": "9"}, [("bad id", "9/65536")]),
        ({"sample": 0}, [("trained twice", "3/0")]),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_sample_that_cannot_be_trained_leaves_the_others(
    changes: dict[str, int | str], breaches: list[tuple[str, str]], at: int
) -> None:
    """Whatever stands before and behind it."""
    good = of_group("3", 7, 5)
    odd = replace(good[1], **{"sample": 2, "offset": 11, **changes})  # type: ignore[arg-type]
    folded = Folded((*good[:at], odd, *good[at:]))
    assert folded.found() == breaches
    is_first_twice = at == 0 and changes == {"sample": 0}
    places = {"3/0": 11 if is_first_twice else 7, "3/1": 5}
    assert {name: place for name, (place, _) in folded.trained().items()} == places
    assert sorted(folded.ledger.fresh) == sorted(places.values())


@pytest.mark.parametrize(
    ("partition", "offset"), [(0, -1), (0, 1 << 44), (-1, 3), (1 << 19, 3), (-1, -1)]
)
def test_a_position_that_no_log_can_have_is_nowhere(partition: int, offset: int) -> None:
    """It is held against nothing that was read, and moves no sibling."""
    first, second, third = of_group("3", 7, 5, 6, partition=1)
    odd = replace(second, partition=partition, offset=offset)
    folded = Folded((first, odd, third))
    assert not folded.found()
    places = [place_of(1, 7), NOWHERE, place_of(1, 6)]
    assert [place for place, _ in folded.trained().values()] == places
    assert folded.ledger.fresh == places


@pytest.mark.parametrize(
    ("told", "noted"),
    [(1 << 40, INT32), (INT32 + 1, INT32), (INT32, INT32), (-1, -1), (-(1 << 50), -INT32)],
)
def test_a_version_beyond_32_bits_is_noted_as_the_nearest_one(told: int, noted: int) -> None:
    """A stranger's word, which no version of ours equals."""
    (ref,) = of_group("3", 7)
    folded = Folded((replace(ref, oldest_policy_version=told),))
    assert folded.trained() == {"3/0": (7, noted)}


def test_a_sample_of_an_earlier_step_keeps_what_that_one_said() -> None:
    """The second step is the one in the wrong."""
    again = sample_ref("3", 0, offset=90)
    folded = Folded(of_group("3", 7, 5), (again, *of_group("4", 8)))
    assert folded.found() == [("closed twice", "3"), ("trained twice", "3/0")]
    assert folded.trained() == {"3/0": (7, 2), "3/1": (5, 2), "4/0": (8, 2)}
    assert folded.ledger.num_trained_twice == 1
