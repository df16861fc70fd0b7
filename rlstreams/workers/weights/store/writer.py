"""Writes each version into the store, in a thread beside training.

A published version is copied into host memory, and at most one copy waits while another is written:
if the store is slower than steps are, the waiting one is passed over for a newer one, and named. A
failed write is tried again until a newer version waits. No failure here ends a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlstreams.schemas.events import NO_VERSION, StoredFile
from rlstreams.workers.weights.channel import WeightError, WeightManifest
from rlstreams.workers.weights.sender import IncidentLog
from rlstreams.workers.weights.snapshot import Snapshot, Snapshots
from rlstreams.workers.weights.store.history import Chains, WeightHistory, some
from rlstreams.workers.weights.store.place import Place
from rlstreams.workers.weights.store.version_file import FileName, Header, Stamp, write

if TYPE_CHECKING:
    import torch

RETRY_S = 1.0  # before a failed write is tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A version that is in the store; `PolicyStored` announces it in the log."""

    policy_version: int
    weight_hash: str
    address: str
    files: tuple[StoredFile, ...]
    oldest_version: int  # of those that can be reached now
    missing: tuple[int, ...]  # passed over since the version before
    seconds: float


@dataclass(frozen=True, slots=True)
class _Job:
    manifest: WeightManifest
    snapshot: Snapshot


class StoreWriter:
    """The trainer's store.

    Args:
        anchor_every: versions from one anchor to the next.
        keep: number of newest anchors that stay, with the deltas behind them; 0: all.
        deadline_s: a write that takes longer is named.
    """

    def __init__(
        self,
        place: Place,
        run: str,
        log: IncidentLog,
        *,
        anchor_every: int,
        keep: int,
        deadline_s: float,
    ) -> None:
        self._place, self._run, self._log = place, run, log
        self._anchor_every, self._keep, self._deadline_s = anchor_every, keep, deadline_s
        self._snapshots: Snapshots | None = None  # made for the device that weights lie on
        self._epoch = 0
        self._changed = threading.Condition()
        self._waiting: _Job | None = None
        self._writing: tuple[_Job, float] | None = None  # and since when, monotonic
        self._base: _Job | None = None  # the version that was stored last
        self._anchor = NO_VERSION  # the newest one
        self._missed: list[int] = []  # not yet reported
        self._news: list[Stored] = []
        self._why = ""  # error of the last write; "" if it succeeded
        self._is_closed = False
        self._thread = threading.Thread(target=self._run_on, name="weight-store", daemon=True)
        self.num_missing = 0  # versions passed over, in this process

    def open(self, epoch: int) -> None:
        """Write from now on, as the trainer of this epoch."""
        self._epoch = epoch
        self._thread.start()

    def take(self, manifest: WeightManifest, weights: Mapping[str, torch.Tensor]) -> None:
        """Have the version written; returns once it is copied."""
        version, text = manifest.policy_version, manifest.weight_hash
        with self._changed:
            jobs = (self._waiting, self._writing and self._writing[0], self._base)
            if any(job and job.manifest == manifest for job in jobs):
                return
        if self._snapshots is None:
            device = next(iter(weights.values())).device
            self._snapshots = Snapshots(device, "pinned")
        self._snapshots.take(version, text, weights)
        snapshot = self._snapshots.lease(version)
        assert snapshot is not None
        self._snapshots.retire(0)  # the lease keeps it
        with self._changed:
            passed_over, self._waiting = self._waiting, _Job(manifest, snapshot)
            if passed_over is not None:
                self._pass_over(passed_over)
            self._changed.notify_all()

    def news(self) -> Sequence[Stored]:
        """Versions stored since the last call."""
        with self._changed:
            news, self._news = self._news, []
            return news

    @property
    def trouble(self) -> str:
        """Reason that the store is behind, for people; "" if it is not."""
        with self._changed:
            if self._writing is None:
                return ""
            job, since_s = self._writing
            lasts_s, troubles = time.monotonic() - since_s, [self._why] if self._why else []
            if lasts_s > self._deadline_s:
                troubles.append(f"not written for {lasts_s:.0f} s (store.deadline_s)")
            if self._missed:
                troubles.append(f"passed over: {some(sorted(self._missed))}")
            what = f"the store is behind: policy version {job.manifest.policy_version}: "
            return what + "; ".join(troubles) if troubles else ""

    def finish(self, deadline_s: float) -> None:
        """Wait until published versions are stored; after `deadline_s` the others are named."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._writing), deadline_s)
            lacking = [self._writing and self._writing[0], self._waiting]
        for job in filter(None, lacking):
            version = job.manifest.policy_version
            self._log.warning("not_stored", policy_version=version, why=self._why or "not in time")

    def close(self) -> None:
        """Begin no other write; idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed or self._waiting is None:
                    return
                job, self._waiting = self._waiting, None
                started_s = time.monotonic()
                self._writing = job, started_s
            self._store(job, started_s)
            with self._changed:
                self._writing = None
                self._changed.notify_all()

    def _store(self, job: _Job, started_s: float) -> None:
        """Write a version, again and again while it fails and no newer one waits."""
        while True:
            try:
                files, oldest = self._written(job)
                break
            except Exception as err:  # noqa: BLE001  (a file system by URL raises what it likes)
                self._failed(job, err)
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting or self._is_closed, RETRY_S):
                    self._pass_over(job)
                    return
        with self._changed:
            self._why = ""
            if self._base is not None:
                self._give_back(self._base)
            self._base = job
            stored = Stored(
                policy_version=job.manifest.policy_version,
                weight_hash=job.manifest.weight_hash,
                address=self._place.address,
                files=files,
                oldest_version=oldest,
                missing=tuple(sorted(self._missed)),
                seconds=time.monotonic() - started_s,
            )
            self._missed.clear()
            self._news.append(stored)

    def _failed(self, job: _Job, err: Exception) -> None:
        why = str(err) if isinstance(err, OSError | WeightError) else f"{type(err).__name__}: {err}"
        with self._changed:
            is_new, self._why = why != self._why, why
        if is_new:
            version = job.manifest.policy_version
            self._log.warning("store_behind", policy_version=version, why=why)

    def _pass_over(self, job: _Job) -> None:
        """Give a version up; call it with the lock."""
        self._missed.append(job.manifest.policy_version)
        self.num_missing += 1
        self._give_back(job)
        self._log.warning("not_stored", policy_version=job.manifest.policy_version)

    def _give_back(self, job: _Job) -> None:
        assert self._snapshots is not None
        self._snapshots.give_back(job.snapshot)

    def _written(self, job: _Job) -> tuple[tuple[StoredFile, ...], int]:
        """Write a version; its files, and the oldest version that can be reached."""
        version, stamp = job.manifest.policy_version, _stamp(job)
        if self._base is None:
            self._place.remove_left_overs(self._epoch)
        chains = Chains(self._place.sizes())
        if self._base is None:
            self._look_round(chains, stamp)
            if isinstance(chains.way(stamp), list):  # stored before the trainer began anew
                self._anchor = max(a.policy_version for a in chains.anchors if a <= stamp)
                return (), min(chains.reachable())
        files, base = [], self._base
        if base is not None and isinstance(chains.way(_stamp(base)), str):
            base = None  # its base's files were removed from outside
        if base is not None:
            files.append(self._write(job, base))
        if base is None or version - self._anchor >= self._anchor_every:
            files.append(self._write(job, None))
            self._anchor = version
            chains = self._retired(version)
        return tuple(files), min(chains.reachable(), default=version)

    def _look_round(self, chains: Chains, stamp: Stamp) -> None:
        """Check that this is the run's own store, and note versions that it lacks.

        Raises:
            WeightError: it has files of another run, or this version with another content.
        """
        version = stamp.policy_version
        if name := next(iter(chains.names), None):
            found = WeightHistory(self._place, self._run).header(name).run
            if found != self._run:
                raise WeightError(
                    f"store.url {self._place.address} has weights of run {found!r}, this is "
                    f"{self._run!r}: name another one"
                )
        others = [s for s in chains.stamps if s.policy_version == version and s != stamp]
        if others:
            raise WeightError(
                f"store.url {self._place.address} has policy version {version} as {others[0]}, "
                f"now it is {stamp}: another run of the same name wrote it; name another one"
            )
        older = [s.policy_version for s in chains.stamps if s.policy_version < version]
        with self._changed:
            lacking = set(range(max(older, default=version) + 1, version))
            self._missed = sorted(lacking.union(self._missed))

    def _write(self, job: _Job, base: _Job | None) -> StoredFile:
        header = Header(
            run=self._run,
            policy_version=job.manifest.policy_version,
            weight_hash=job.manifest.weight_hash,
            layout=job.manifest.layout,
            base_version=base.manifest.policy_version if base else NO_VERSION,
            base_hash=base.manifest.weight_hash if base else "",
        )
        tensors = job.snapshot.tensors
        name = str(header.name)
        with self._place.writing(name, self._epoch) as out:
            num_bytes, checksum = write(
                out, header, tensors, base.snapshot.tensors if base else None
            )
        return StoredFile(
            name=name, base_version=header.base_version, num_bytes=num_bytes, checksum=checksum
        )

    def _retired(self, newest: int) -> Chains:
        """Remove anchors beyond `keep`, each after its deltas; the chains that are left.

        Anchors above `newest` are a successor's, and not counted.
        """
        chains = Chains(self._place.sizes())
        anchors = [a.policy_version for a in chains.anchors if a.policy_version <= newest]
        if not self._keep or len(anchors) <= self._keep:
            return chains
        oldest = anchors[-self._keep]
        doomed = [n for n in chains.names if _is_before(n, oldest)]
        # A delta never outlives its base: the highest version first, and its anchor last.
        for name in sorted(doomed, key=lambda n: (n.stamp, n.base is not None), reverse=True):
            self._place.remove(str(name))
        return Chains(self._place.sizes())


def _stamp(job: _Job) -> Stamp:
    return Stamp.of(job.manifest.policy_version, job.manifest.weight_hash)


def _is_before(name: FileName, oldest: int) -> bool:
    version = name.stamp.policy_version
    return version < oldest or (version == oldest and name.base is not None)
