"""Tokens sampled for nothing: those of training samples that no step trains, by reason."""

from __future__ import annotations

from collections import Counter

from rlstreams.schemas.events import Trajectory
from rlstreams.streams.samples.life import Group
from rlstreams.streams.segments import num_sampled


class Spent:
    """Tokens of samples that no step has trained so far; trained ones are not kept."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[Group, dict[int, int]]] = {}  # by group, then by sample

    def sampled(self, group: Group, event: Trajectory) -> None:
        """Take the first trajectory of a sample."""
        if group.number is not None and not group.trained >> event.sample & 1:
            _, tokens = self._left.setdefault(group.id, (group, {}))
            tokens[event.sample] = num_sampled(event)

    def trained(self, group: Group, number: int) -> None:
        """Note that a step trained the sample."""
        _, tokens = self._left.get(group.id, (group, {}))
        tokens.pop(number, None)
        if not tokens:
            self._left.pop(group.id, None)

    @property
    def in_vain(self) -> Counter[str]:
        """Tokens by the reason why their sample is not trained; not those that still may be."""
        found: Counter[str] = Counter()
        for group, tokens in self._left.values():
            for number, num in tokens.items():
                found[group.why_untrained(number)] += num
        del found[""]
        return found
