"""Staleness of trained tokens, measured from a step and the scored records that it names.

Neither is a counter of the trainer: the step names the version that it made, the record the version
that sampled each segment (decision 0010). Records that no step has taken yet wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlstreams.streams.audit.ledger import AuditLedger
from rlstreams.streams.audit.report import Breaches, BreachKind
from rlstreams.streams.audit.samples import AuditSample

Segments = Sequence[tuple[int, int, int]]  # (index, version, tokens) of the policy's segments


class Staleness:
    """Counts trained tokens by staleness; adds breaches of samples too stale or mislabelled."""

    def __init__(self, ledger: AuditLedger, breaches: Breaches) -> None:
        self.tokens: Counter[int] = Counter()
        self._ledger = ledger
        self._breaches = breaches
        self._waiting: dict[
            int, tuple[AuditSample, Segments]
        ] = {}  # by place: scored, not yet trained

    def scored(self, sample: AuditSample, place: int, segments: Segments) -> None:
        """Take a scored record."""
        if sample.used == place:
            sample.used = place  # the same object as `sample.scored`, to save memory
            self._measure(sample, segments)
        elif sample.group.is_open:
            self._waiting[place] = sample, segments

    def trained(self) -> None:
        """Measure samples that the ledger trained just now and that were scored before."""
        for sample in self._ledger.fresh:
            place = sample.used
            if place is not None and place in self._waiting:
                holder, segments = self._waiting[place]
                if holder is sample:
                    del self._waiting[place]
                    self._measure(sample, segments)
        self._ledger.fresh.clear()

    def forget_closed(self) -> None:
        """Drop records that wait for a step that will not come."""
        self._waiting = {p: w for p, w in self._waiting.items() if w[0].group.is_open}

    def _measure(self, sample: AuditSample, segments: Segments) -> None:
        if sample.is_measured:
            return
        sample.is_measured = True
        step = sample.group.step
        base, bound = self._ledger.steps[step]
        masked = self._ledger.masked.pop((sample.group.id, sample.number), ())
        oldest = None
        for index, version, num_tokens in segments:
            if not num_tokens or index in masked:
                continue
            oldest = version if oldest is None else min(oldest, version)
            distance = base - version
            self.tokens[distance] += num_tokens
            if distance < 0 or (bound is not None and distance > bound):
                detail = f"step {step}, segment {index}: version {version} trained on {base}, "
                self._breaches.add(BreachKind.TOO_STALE, sample.name, f"{detail}bound {bound}")
        if oldest is not None and oldest != sample.oldest:
            detail = f"step {step} says version {sample.oldest}, tokens {oldest}"
            self._breaches.add(BreachKind.MISLABELLED, sample.name, detail)
