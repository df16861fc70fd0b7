"""What an audit remembers: some forty bytes a sample, in arrays, whatever the size of its payload.

Groups are numbered as they are met; the samples of a group are neighbours, a *slot* each. Numbers
of training groups are keys as they are, evaluations become negative ones.
"""

from __future__ import annotations

from array import array

import numpy as np

from rlstreams.schemas.walk import Numbers
from rlstreams.streams.log.group_ids import MAX_DIGITS, evaluation_id
from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES

MAX_SAMPLES = 1 << 16  # of one group; a larger number is a foreign record
NOWHERE = -1  # the place of a record that was not seen
NO_GROUP = -(1 << 63)  # in place of a key: an id that no group has

# What is known of a sample, one byte each.
ISSUED, ROLLED_OUT, SCORED_ONCE, DEAD, TRAINED, MEASURED = 1, 2, 4, 8, 16, 32
SEEN_IN = {PROMPTS.name: ISSUED, TRAJECTORIES.name: ROLLED_OUT, SCORED.name: SCORED_ONCE}

_TRUSTED_SIZE = 1024  # a larger group gets its room sample by sample: it may be a stranger's word
OFFSET_BITS = 44
_MAX_OFFSET, _MAX_PARTITION = 1 << OFFSET_BITS, 1 << 19
_ROW_BITS, _MAX_VERSION = 32, 1 << 30


def place_of(partition: int, offset: int) -> int:
    """Partition and offset in one integer; NOWHERE if no log can have them."""
    if 0 <= partition < _MAX_PARTITION and 0 <= offset < _MAX_OFFSET:
        return partition << OFFSET_BITS | offset
    return NOWHERE


def position_at(place: int) -> tuple[int, int]:
    """The partition and offset of a place."""
    return place >> OFFSET_BITS, place & (_MAX_OFFSET - 1)


def group_key(text: bytes) -> int | None:
    """The number of a training group; below 0 for an evaluation; None: an id that is neither."""
    if text.isdigit():
        is_plain = len(text) <= MAX_DIGITS and (text[0] != ord("0") or len(text) == 1)
        return int(text) if is_plain else None
    found = evaluation_id(text.decode("ascii", "replace"))
    if found is None or found[0] >= _MAX_VERSION or found[1] >= 1 << _ROW_BITS:
        return None
    return -1 - (found[0] << _ROW_BITS | found[1])


def group_name(key: int) -> str:
    """The group's id as it stands in events."""
    if key >= 0:
        return str(key)
    version, row = divmod(-1 - key, 1 << _ROW_BITS)
    return f"e{version}-{row}"


class Table:
    """Columns by group and columns by sample; `group` makes room, then index them directly."""

    def __init__(self) -> None:
        self.index: dict[int, int] = {}  # key -> number of the group here
        # By group.
        self.keys = array("q")
        self.first = array("q")  # slot of its sample 0
        self.room = array("i")  # slots that it has
        self.size = array("i")  # samples that its prompts promise; 0: no prompt was seen
        self.closed = array("q")  # 0: open; n: by step n; -n: dropped for reason n - 1
        # By slot.
        self.flags = bytearray()
        self.group_of = array("i")
        self.prompt_at = array("q")
        self.trajectory_at = array("q")
        self.scored_at = array("q")
        self.used_at = array("q")  # where the step that trained it found its bytes
        self.oldest = array("i")  # policy version of its oldest tokens, as the ledger says
        self._columns = (self.prompt_at, self.trajectory_at, self.scored_at, self.used_at)

    def group(self, key: int, sample: int, size: int) -> int:
        """The group's number here, with room for `sample` (-1: none) and for `size` samples."""
        number = self.index.get(key)
        if number is None:
            number = self.index[key] = len(self.keys)
            self.keys.append(key)
            self.size.append(0)
            self.closed.append(0)
            room = max(sample + 1, size if size <= _TRUSTED_SIZE else 0)
            self.first.append(self._new_slots(number, room))
            self.room.append(room)
        elif sample >= self.room[number] or _TRUSTED_SIZE >= size > self.room[number]:
            self._move(number, max(2 * sample + 2 if size <= sample else size, sample + 1))
        return number

    def slots(self, keys: Numbers, samples: Numbers, sizes: Numbers) -> Numbers:
        """The slot of each of these samples, made where it is not there; see `group`."""
        distinct, which = np.unique(keys, return_inverse=True)
        last, size = np.full(len(distinct), -1), np.zeros(len(distinct), np.int64)
        np.maximum.at(last, which, samples)
        np.maximum.at(size, which, np.where(sizes <= _TRUSTED_SIZE, sizes, 0))
        wanted = zip(distinct.tolist(), last.tolist(), size.tolist(), strict=True)
        numbers = [self.group(*group) for group in wanted]
        first = np.array([self.first[number] for number in numbers], np.int64)
        return np.asarray(first[which] + samples, np.int64)

    def name(self, slot: int) -> str:
        """`group/sample` as events write it."""
        number = self.group_of[slot]
        return f"{group_name(self.keys[number])}/{slot - self.first[number]}"

    def _new_slots(self, number: int, room: int) -> int:
        first = len(self.flags)
        self.flags.extend(bytes(room))
        self.group_of.extend(array("i", (number,)) * room)
        self.oldest.frombytes(bytes(self.oldest.itemsize * room))
        nowhere = array("q", (NOWHERE,)) * room
        for column in self._columns:
            column.extend(nowhere)
        return first

    def _move(self, number: int, room: int) -> None:
        """To larger quarters; the old ones stay empty. Rare: a group's size is known early."""
        old, held = self.first[number], self.room[number]
        new = self.first[number] = self._new_slots(number, room)
        self.room[number] = room
        self.flags[new : new + held] = self.flags[old : old + held]
        self.flags[old : old + held] = bytes(held)
        self.oldest[new : new + held] = self.oldest[old : old + held]
        for column in self._columns:
            column[new : new + held] = column[old : old + held]
            column[old : old + held] = array("q", (NOWHERE,)) * held
