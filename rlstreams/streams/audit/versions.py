"""The audit's account of weights: each version's hash, publications, loads and uses.

`steps` alone defines a version: the first claim names the model folder's, or a branch the one that
it begins with; a step or a drifted redo makes each next one. Publications of a fenced or forged
epoch are void: they are passed by, and are a breach only where a worker used them.
"""

from __future__ import annotations

from typing import NamedTuple

from rlstreams.schemas.events import (
    Event,
    PolicyLoaded,
    PolicyPublished,
    RedoDrifted,
    RunBranched,
    StepCompleted,
    TrainerStarted,
)
from rlstreams.streams.audit.report import Breaches, BreachKind
from rlstreams.streams.audit.samples import AuditSample
from rlstreams.streams.log.fencing import EpochGate
from rlstreams.streams.log.record import Position

CLOCK_S = 5.0  # a worker's wall clock may be set back while it runs

Weights = tuple[int, str]  # version and hash
Load = tuple[str, str]  # worker, or ANY_WORKER, and load id
ANY_WORKER = "a worker of its session"


class _Publication(NamedTuple):
    weights: Weights
    epoch: int
    position: Position


class Versions:
    """Takes events of `steps`, `policy-versions` and `policy-pulls`, and trajectories' versions."""

    def __init__(self) -> None:
        self._gate = EpochGate()
        self._made: dict[int, str] = {}  # hash by version
        self._conflicts: dict[int, str] = {}  # a second hash by version
        self._claims: set[int] = set()
        self._publications: list[_Publication] = []  # in the order of their topic
        self._void: dict[Weights, str] = {}  # why no worker should hold these
        self._loads: dict[Load, tuple[Weights, int]] = {}  # with the worker's time, ms
        # By load and weights as trajectories name them: the first sample, the earliest end, ms.
        self._used: dict[tuple[Load, Weights], tuple[AuditSample, int]] = {}
        self.num_unread = 0  # records of `steps`: each may have made a version, or claimed the run

    def ledger(self, event: Event) -> None:
        """Take an event of `steps`; it may be newer than the last one of the ledger of samples."""
        if not self._gate.admits(event):
            if isinstance(event, StepCompleted):
                why = f"was made by epoch {event.epoch} after it was taken over"
                self._void[event.policy_version, event.weight_hash] = why
        elif isinstance(event, TrainerStarted):
            self._claims.add(event.epoch)
            if not self._made:
                self._make(event.policy_version, event.weight_hash)
        elif isinstance(event, RunBranched):
            if not self._made:  # else it is void
                self._make(event.policy_version, event.weight_hash)
        elif isinstance(event, StepCompleted):
            self._make(event.policy_version, event.weight_hash)
        elif isinstance(event, RedoDrifted):
            self._make(event.policy_version, event.actual_hash)

    def published(self, event: PolicyPublished, position: Position) -> None:
        """Take a publication, in the order of its topic."""
        weights = event.policy_version, event.weight_hash
        self._publications.append(_Publication(weights, event.epoch, position))

    def loaded(self, event: PolicyLoaded) -> None:
        """Take a worker's word that it holds a version."""
        weights = event.policy_version, event.weight_hash
        for worker in (event.worker, ANY_WORKER):
            self._loads.setdefault((worker, event.load_id), (weights, event.loaded_at_ms))

    def used(self, load: Load, weights: Weights, sample: AuditSample, finished_at_ms: int) -> None:
        """Take the weights that a trajectory names."""
        first, earliest_ms = self._used.get((load, weights), (sample, finished_at_ms))
        self._used[load, weights] = first, min(earliest_ms, finished_at_ms)

    def check(self, breaches: Breaches) -> list[Position]:
        """Hold uses against loads, loads against publications, publications against `steps`.

        Returns:
            Positions of void publications.
        """
        for version, text in self._conflicts.items():
            made = self._made[version][:12]
            detail = f"{made}, then {text[:12]}: a version number has exactly one content"
            breaches.add(BreachKind.VERSION_TWICE, f"version {version}", detail)
        published, reasons, void = self._check_published(breaches)
        reasons = self._void | reasons
        named: set[Weights] = set()
        for (worker, load_id), (weights, _) in self._loads.items():
            if weights not in published and weights not in named:
                named.add(weights)
                version, text = weights
                why = reasons.get(weights, "was never published")
                detail = f"{worker}, load {load_id}: {text[:12]} {why}"
                breaches.add(BreachKind.UNPUBLISHED, f"version {version}", detail)
        for (load, weights), (sample, finished_at_ms) in self._used.items():
            if problem := self._not_held(load, weights, finished_at_ms):
                worker, load_id = load
                detail = f"first use of load {load_id!r} (version {weights[0]}) of {worker}"
                breaches.add(BreachKind.UNKNOWN_LOAD, sample.name, f"{detail}, {problem}")
        return void

    def _check_published(
        self, breaches: Breaches
    ) -> tuple[set[Weights], dict[Weights, str], list[Position]]:
        """Return published weights, the reasons of void ones, and the positions of these.

        An epoch exists only by its claim: an epoch above every claim is forged, and fences none.
        Each unreadable record of `steps` excuses one claim or one version.
        """
        unclaimed = sorted({epoch for _, epoch, _ in self._publications} - self._claims)
        strangers = set(unclaimed[self.num_unread :])
        num_unread = max(0, self.num_unread - len(unclaimed))
        forged = {epoch for epoch in strangers if epoch > max(self._claims, default=epoch)}
        newest = -1
        published: dict[Weights, int] = {}
        reasons: dict[Weights, str] = {}
        void: list[Position] = []
        for weights, epoch, position in self._publications:
            if epoch in strangers:
                strangers.remove(epoch)
                detail = f"published by epoch {epoch}, which never claimed the run, {position}"
                breaches.add(BreachKind.FALSE_VERSION, f"version {weights[0]}", detail)
            is_forged = epoch in forged
            if epoch < newest or is_forged:
                did = "which never claimed the run" if is_forged else "after it was taken over"
                reasons[weights] = f"was published by epoch {epoch} {did}"
                void.append(position)
            else:
                newest = epoch
                published.setdefault(weights, epoch)
        for (version, text), epoch in published.items():
            made = self._made.get(version)
            if made is None and num_unread:
                num_unread -= 1
            elif made != text:
                says = "no step made it" if made is None else f"`steps` says {made[:12]}"
                detail = f"published with {text[:12]} by epoch {epoch}, {says}"
                breaches.add(BreachKind.FALSE_VERSION, f"version {version}", detail)
        return set(published), reasons, void

    def _make(self, version: int, text: str) -> None:
        if self._made.setdefault(version, text) != text:
            self._conflicts.setdefault(version, text)

    def _not_held(self, load: Load, weights: Weights, finished_at_ms: int) -> str:
        if load not in self._loads:
            return "never confirmed"
        held, loaded_at_ms = self._loads[load]
        if held != weights:
            return f"confirmed as version {held[0]}, {held[1][:12]}"
        if loaded_at_ms > finished_at_ms + CLOCK_S * 1000:
            late_s = (loaded_at_ms - finished_at_ms) / 1000
            return f"confirmed {late_s:.0f} s after the sample was done"
        return ""
