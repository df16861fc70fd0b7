"""A checkpoint is a snapshot of the fold over the ledger: a folder that is complete or absent.

It is written under a temporary name next to its final one; each file, the folder and its parent
are synced around one rename. The ledger decides which one is loaded, never the folder's age.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.schemas.events import PassedOverCheckpoint
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.synced import sync

if TYPE_CHECKING:
    from torch import Tensor

BASE_EPOCH = 0  # of the checkpoint that a branch begins with: no trainer of the branch wrote it
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST_FILE = "manifest.json"
PIECE_BYTES = 4 << 20  # of a file, hashed by one thread
_NAME = re.compile(r"(\d{6,})-(\d{8,})")
_TEMPORARY = ".tmp-"
_LEFT_OVER = re.compile(r"\.tmp-(?:removed-)?(\d{6,})-\d{8,}")


class CheckpointError(Exception):
    """A checkpoint folder that cannot be used; names folder, file and difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a checkpoint. `files` is filled in when it is saved."""

    run: str
    epoch: int
    step: int  # number of steps done
    policy_version: int
    weight_hash: str
    rng: str = ""  # hexadecimal
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # name -> `piecewise_sha256`

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"{self.epoch:06d}-{self.step:08d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest checkpoint that may be used, if any."""

    manifest: Manifest | None
    passed_over: tuple[PassedOverCheckpoint, ...]  # newer ones, newest first


class CheckpointStore:
    """The checkpoints of one run, in one folder. One process writes at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(
        self, manifest: Manifest, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
    ) -> Manifest:
        """Write a checkpoint; returns its manifest with the files' hashes.

        The tensors must not change meanwhile. A folder of the same epoch and step is replaced.

        Raises:
            OSError: disk full, no permission; nothing is left of the new one.
        """
        from safetensors.torch import save_file

        reach(CrashPoint.CHECKPOINT_BEFORE)
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f"{_TEMPORARY}{manifest.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            for name, tensors in ((MODEL_FILE, weights), (OPTIMIZER_FILE, optimizer)):
                plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
                save_file(plain, temporary / name)
            files = (MODEL_FILE, OPTIMIZER_FILE)
            hashes = {name: piecewise_sha256(temporary / name) for name in files}
            whole = Manifest(**(asdict(manifest) | {"files": hashes}))
            text = json.dumps(asdict(whole), indent=2, sort_keys=True)
            (temporary / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")
            self._publish(temporary, manifest.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return whole

    def _publish(self, temporary: Path, name: str) -> None:
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        reach(CrashPoint.CHECKPOINT_WRITTEN)
        self._remove(name)
        temporary.rename(self._folder / name)
        sync(self._folder)
        reach(CrashPoint.CHECKPOINT_AFTER)

    def newest(self, objection: Callable[[Manifest], str]) -> Found:
        """The checkpoint of the highest step that is whole and has no objection.

        Args:
            objection: compares with the ledger: a reason against a checkpoint, or "". Called before
                files are read, because it costs less.
        """
        passed_over: list[PassedOverCheckpoint] = []
        for name in self._names():
            try:
                manifest = self._manifest(name)
                reason = objection(manifest)
                if not reason:
                    self._check_files(manifest)
            except CheckpointError as err:
                reason = str(err)
            if not reason:
                return Found(manifest=manifest, passed_over=tuple(passed_over))
            passed_over.append(PassedOverCheckpoint(checkpoint=name, reason=reason))
        return Found(manifest=None, passed_over=tuple(passed_over))

    def load(self, manifest: Manifest) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and optimizer tensors, on the CPU. No pickle is read."""
        from safetensors.torch import load_file

        folder = self._folder / manifest.name
        return load_file(folder / MODEL_FILE), load_file(folder / OPTIMIZER_FILE)

    def load_weights(self, manifest: Manifest) -> dict[str, Tensor]:
        """The weights alone, on the CPU."""
        from safetensors.torch import load_file

        weights: dict[str, Tensor] = load_file(self._folder / manifest.name / MODEL_FILE)
        return weights

    def manifests(self) -> Iterator[Manifest]:
        """Readable manifests, the highest step first; their files are not looked at."""
        for name in self._names():
            with contextlib.suppress(CheckpointError):
                yield self._manifest(name)

    def prune(self, keep: int, epoch: int) -> list[str]:
        """Remove all but the `keep` written last, by epoch and step; returns the names removed.

        By epoch first: after a damaged one was passed over, the steps of the next epoch count up
        from below it, and the one just written must stay. Checkpoints of epochs above `epoch`, the
        caller's, are never removed: a stopped trainer that woke up leaves them alone. Call it only
        after a commit that followed the save: then any successor starts from the one just written,
        and needs none of those removed here. A branch's base is kept: its first steps are redone
        from it, as other runs' are from the model folder.
        """
        ours = [n for n in self._names() if BASE_EPOCH < _epoch_and_step(n)[0] <= epoch]
        removed = sorted(ours, key=_epoch_and_step, reverse=True)[keep:]
        for name in removed:
            self._remove(name)
        return removed

    def _names(self) -> list[str]:
        """Checkpoints by step, then epoch, the highest first."""
        if not self._folder.is_dir():
            return []
        names = [path.name for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(names, key=lambda name: _epoch_and_step(name)[::-1], reverse=True)

    def _manifest(self, name: str) -> Manifest:
        path = self._folder / name / MANIFEST_FILE
        try:
            manifest = Manifest(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as err:
            raise CheckpointError(f"cannot read {MANIFEST_FILE}: {err}") from err
        if manifest.name != name:
            raise CheckpointError(f"{MANIFEST_FILE} is of {manifest.name}")
        return manifest

    def _check_files(self, manifest: Manifest) -> None:
        for name in (MODEL_FILE, OPTIMIZER_FILE):
            expected = manifest.files.get(name, "")
            try:
                actual = piecewise_sha256(self._folder / manifest.name / name)
            except OSError as err:
                raise CheckpointError(f"cannot read {name}: {err}") from err
            if actual != expected:
                raise CheckpointError(
                    f"{name} has hash {actual[:12]}, the manifest says {expected[:12]}"
                )

    def _remove(self, name: str) -> None:
        # Renamed first: a checkpoint that is half removed must not look like one.
        doomed = self._folder / f"{_TEMPORARY}removed-{name}"
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # not there, or no longer
            (self._folder / name).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def clean(self, epoch: int) -> None:
        """Remove left-overs of writers that died; one that only slept finds its folder gone.

        Args:
            epoch: the caller's own, by its claim. Files of later epochs may still be written: the
                caller may have slept.
        """
        for path in self._folder.glob(f"{_TEMPORARY}*"):
            found = _LEFT_OVER.fullmatch(path.name)
            if found and int(found[1]) <= epoch:
                shutil.rmtree(path, ignore_errors=True)


def objection(run: str, ledger: Ledger, manifest: Manifest) -> str:
    """The ledger's objection to a checkpoint, or "". Pure.

    A trainer that was stopped, and wakes after its successor's claim, may still finish writing a
    checkpoint. It is accepted if it holds the committed weights of a step that was committed in
    that trainer's time or before. All its other checkpoints are refused here.
    """
    if manifest.run != run:
        return f"it is of run {manifest.run!r}, this is {run!r}"
    is_base = manifest.epoch == BASE_EPOCH
    return _not_base(ledger, manifest) if is_base else _not_made(ledger, manifest)


def _not_made(ledger: Ledger, manifest: Manifest) -> str:
    fact = ledger.steps.get(manifest.step)
    if manifest.epoch not in ledger.claims:
        return f"epoch {manifest.epoch} has no claim in the ledger"
    if fact is None:
        return f"step {manifest.step} is not in the ledger, whose newest is {ledger.last_step}"
    if fact.epoch > manifest.epoch:
        return (
            f"step {manifest.step} was done in epoch {fact.epoch}: "
            f"epoch {manifest.epoch}, which wrote it, was fenced before"
        )
    if fact.weight_hash != manifest.weight_hash:
        return (
            f"step {manifest.step} with weights {manifest.weight_hash[:12]} "
            f"is not what the ledger committed: {fact.weight_hash[:12]}"
        )
    return ""


def _not_base(ledger: Ledger, manifest: Manifest) -> str:
    branch = ledger.branch
    if branch is None:
        return "it is what a branch begins with, and the ledger does not begin as a branch"
    base = branch.step, branch.weight_hash
    if (manifest.step, manifest.weight_hash) != base:
        return (
            f"step {manifest.step} with weights {manifest.weight_hash[:12]} is not what the branch "
            f"begins with: step {branch.step} with {branch.weight_hash[:12]}"
        )
    return ""


def _epoch_and_step(name: str) -> tuple[int, int]:
    epoch, _, step = name.partition("-")
    return int(epoch), int(step)


def piecewise_sha256(path: Path) -> str:
    """SHA-256 over the SHA-256 of each 4 MiB of a file, 64 hexadecimal digits, on several cores: a
    checkpoint may have tens of gigabytes, and a drain waits while it is written.

    Raises:
        OSError: it cannot be read.
    """
    whole = hashlib.sha256()
    with path.open("rb") as file, ThreadPoolExecutor(thread_name_prefix="file-hash") as pool:
        starts = range(0, os.fstat(file.fileno()).st_size, PIECE_BYTES)
        for digest in pool.map(partial(_sha256_at, file.fileno()), starts):
            whole.update(digest)
    return whole.hexdigest()


def _sha256_at(descriptor: int, start: int) -> bytes:
    digest = hashlib.sha256()
    left = PIECE_BYTES
    while left and (data := os.pread(descriptor, left, start + PIECE_BYTES - left)):
        digest.update(data)
        left -= len(data)
    return digest.digest()
