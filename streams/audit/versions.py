"""The audit's account of weights: which version has which hash, who published, held and used it.

`steps` alone says what a version is: the first claim names the model folder's, a step or a drifted
redo makes each next one. What an epoch wrote after a newer one had taken over is passed by; it is a
breach only where something used it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlstreams.schemas.events import (
    Event,
    PolicyLoaded,
    PolicyPublished,
    RedoDrifted,
    StepCompleted,
    TrainerStarted,
)
from rlstreams.streams.audit.report import Breaches, BreachKind
from rlstreams.streams.audit.table import group_name
from rlstreams.streams.log.fencing import EpochGate

CLOCK_S = 5.0  # a worker's wall clock may be set back while it runs


@dataclass(slots=True)
class _Use:
    """Weights as trajectories name them."""

    sample: str  # the first one, for people
    finished_at_ms: int  # the earliest one


class Versions:
    """Takes events of `steps`, `policy-versions` and `policy-pulls`, and what trajectories name."""

    def __init__(self) -> None:
        self._gate = EpochGate()
        self._made: dict[int, bytes] = {}  # hash by version
        self._conflicts: dict[int, bytes] = {}  # a second hash by version
        self._void_made: dict[tuple[int, bytes], int] = {}  # epoch by version and hash
        self._claims: set[int] = set()
        self._newest_publisher = -1
        self._publishers: dict[int, int] = {}  # by epoch: the first version that it published
        self._published: dict[tuple[int, bytes], int] = {}  # epoch by version and hash
        self._void_published: dict[tuple[int, bytes], int] = {}
        self._loads: dict[tuple[bytes, bytes], tuple[int, bytes, int]] = {}
        self._used: dict[tuple[bytes, bytes, int, bytes], _Use] = {}
        self._texts: dict[bytes, bytes] = {}  # one object for each hash
        self.num_void = 0  # publications of a fenced epoch
        self.num_unread = 0  # records of `steps`: each may have made a version, or claimed the run

    def ledger(self, event: Event) -> None:
        """Take an event of `steps`; may be ahead of what the ledger of samples has seen."""
        if not self._gate.admits(event):
            if isinstance(event, StepCompleted):
                made = (event.policy_version, self._text(event.weight_hash))
                self._void_made[made] = event.epoch
        elif isinstance(event, TrainerStarted):
            self._claims.add(event.epoch)
            if not self._made:
                self._make(event.policy_version, event.weight_hash)
        elif isinstance(event, StepCompleted):
            self._make(event.policy_version, event.weight_hash)
        elif isinstance(event, RedoDrifted):
            self._make(event.policy_version, event.actual_hash)

    def published(self, event: PolicyPublished) -> None:
        """Take a publication, in the order of its topic."""
        what = (event.policy_version, self._text(event.weight_hash))
        if event.epoch < self._newest_publisher:
            self.num_void += 1
            self._void_published[what] = event.epoch
        else:
            self._newest_publisher = event.epoch
            self._publishers.setdefault(event.epoch, event.policy_version)
            self._published.setdefault(what, event.epoch)

    def loaded(self, event: PolicyLoaded) -> None:
        """Take a worker's word that it holds a version."""
        key = (event.worker.encode(), event.load_id.encode())
        held = (event.policy_version, self._text(event.weight_hash), event.loaded_at_ms)
        self._loads.setdefault(key, held)

    def used(
        self, load: tuple[bytes, bytes, int, bytes], sample: tuple[int, int], finished_at_ms: int
    ) -> None:
        """Take (worker, load id, version, hash) as a trajectory names them.

        Args:
            sample: key of the group, and number within.
        """
        use = self._used.get(load)
        if use is None:
            self._used[load] = _Use(f"{group_name(sample[0])}/{sample[1]}", finished_at_ms)
        elif finished_at_ms < use.finished_at_ms:
            use.finished_at_ms = finished_at_ms

    def check(self, breaches: Breaches) -> None:
        """Hold uses against loads, loads against publications, publications against `steps`."""
        for version, text in self._conflicts.items():
            made = _short(self._made[version])
            detail = f"{made}, then {_short(text)}: a version number has exactly one content"
            breaches.add(BreachKind.VERSION_TWICE, f"version {version}", detail)
        num_unread = self.num_unread
        for epoch in sorted(self._publishers.keys() - self._claims):
            if num_unread:
                num_unread -= 1
                continue
            detail = f"published by epoch {epoch}, which never claimed the run"
            breaches.add(BreachKind.FALSE_VERSION, f"version {self._publishers[epoch]}", detail)
        for (version, text), epoch in self._published.items():
            if num_unread and version not in self._made:
                num_unread -= 1
            elif problem := self._unmade(version, text, epoch):
                breaches.add(BreachKind.FALSE_VERSION, f"version {version}", problem)
        held: set[tuple[int, bytes]] = set()
        for (worker, load_id), (version, text, _) in self._loads.items():
            if (version, text) not in self._published and (version, text) not in held:
                held.add((version, text))
                detail = f"{_text(worker)}, load {_text(load_id)}: {self._why(version, text)}"
                breaches.add(BreachKind.UNPUBLISHED, f"version {version}", detail)
        for (worker, load_id, version, text), use in self._used.items():
            if problem := self._not_held((worker, load_id), version, text, use.finished_at_ms):
                detail = f"first use of load {_text(load_id)!r} (version {version}) of "
                detail += f"{_text(worker)}, {problem}"
                breaches.add(BreachKind.UNKNOWN_LOAD, use.sample, detail)

    def _make(self, version: int, weight_hash: str) -> None:
        text = self._text(weight_hash)
        if self._made.setdefault(version, text) != text:
            self._conflicts.setdefault(version, text)

    def _unmade(self, version: int, text: bytes, epoch: int) -> str:
        made = self._made.get(version)
        if made == text:
            return ""
        says = "no step made it" if made is None else f"`steps` says {_short(made)}"
        return f"published with {_short(text)} by epoch {epoch}, {says}"

    def _why(self, version: int, text: bytes) -> str:
        """Why nobody should hold these weights."""
        for epochs, did in ((self._void_published, "published"), (self._void_made, "made")):
            if (version, text) in epochs:
                epoch = epochs[version, text]
                return f"{_short(text)} was {did} by epoch {epoch} after it was taken over"
        return f"{_short(text)} was never published"

    def _not_held(
        self, key: tuple[bytes, bytes], version: int, text: bytes, finished_at_ms: int
    ) -> str:
        load = self._loads.get(key)
        if load is None:
            return "never confirmed"
        if load[:2] != (version, text):
            return f"confirmed as version {load[0]}, {_short(load[1])}"
        if load[2] > finished_at_ms + CLOCK_S * 1000:
            return f"confirmed {(load[2] - finished_at_ms) / 1000:.0f} s after the sample was done"
        return ""

    def _text(self, weight_hash: str) -> bytes:
        text = weight_hash.encode()
        return self._texts.setdefault(text, text)


def _short(text: bytes) -> str:
    return _text(text[:12])


def _text(text: bytes) -> str:
    return text.decode("utf-8", "replace")
