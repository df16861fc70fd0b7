"""Witnesses of a ledger's length: what else in the log and on disk proves that steps were made.

A step is committed before its version is announced, before its checkpoint is written, and before
anything is scored under it. So a later version than the ledger's proves that the end of `steps` is
gone: Kafka truncates a log at its first damaged batch, and the run would go on from there, train
samples again and set aside what was made under the versions that are missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import PolicyPublished, ScoredTrajectory
from rlstreams.schemas.projection import Projection
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.errors import ConfigError, DeadlineError
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.log.topics import POLICY_VERSIONS, SCORED, STEPS
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore

NUM_SCORES = 32  # offsets looked at before the end of each partition
READ_DEADLINE_S = 60.0
_SCORES = Projection(ScoredTrajectory, "scores.policy_version", "scores.weight_hash")


def check_tail(bus: Bus, ledger: Ledger, run: str, run_folder: Path) -> None:
    """Return if no witness knows of a later step than `steps`.

    Raises:
        ConfigError: the newest step of each witness that does, and how to go on.
        DeadlineError: a topic could not be read.
    """
    newest = max(ledger.last_step, ledger.last_void_step)
    found: list[str] = []
    manifests = CheckpointStore(run_folder / "checkpoints").manifests()
    saved = next((m for m in manifests if m.run == run and m.step > newest), None)
    if saved is not None:
        found.append(f"checkpoint {saved.name} is of step {saved.step}")
    later = [event for event in _published(bus) if event.step > newest]
    scored = _scored(bus) if later else {}
    # An announcement under an epoch that nobody claimed is forged, unless samples were scored so.
    confirmed = [e for e in later if scored.get(e.policy_version) == e.weight_hash]
    later = [e for e in later if e.epoch <= ledger.epoch or e in confirmed]
    if later:
        last = max(later, key=lambda event: event.step)
        found.append(
            f"{POLICY_VERSIONS.name} announces version {last.policy_version} of step {last.step}"
        )
    if confirmed:
        step = max(event.step for event in confirmed)
        found.append(f"samples in {SCORED.name} were scored under the weights of step {step}")
    if found:
        raise ConfigError(
            f"run {run!r} cannot be resumed: the end of {STEPS.name} is lost. Its newest step is "
            f"{ledger.last_step}, but {'; '.join(found)}. The broker cuts a topic where its files "
            "are damaged; the samples that were trained behind the cut would be trained twice. "
            "Nothing was written. Put the broker's data folder back from a copy; "
            "or go on from the newest checkpoint that the log confirms under a new run: "
            "`rlstreams export-model RUN --to DIR`, then `--model.path=DIR --run.id=NAME`"
        )


def _published(bus: Bus) -> Iterator[PolicyPublished]:
    for raw in _records(bus, bus.beginnings(POLICY_VERSIONS.name)):
        try:
            event = decoded(raw, bus.schemas()).event
        except DecodeError:
            continue
        if isinstance(event, PolicyPublished):
            yield event


def _scored(bus: Bus) -> dict[int, str]:
    """Hash by version, of what the newest samples were scored under."""
    begins, ends = bus.beginnings(SCORED.name), bus.ends(SCORED.name)
    found: dict[int, str] = {}
    for raw in _records(bus, {p: max(begins[p], end - NUM_SCORES) for p, end in ends.items()}):
        try:
            versions, hashes = _SCORES.read(raw.value, bus.schemas())
        except DecodeError:
            continue
        found.update(zip(versions, hashes, strict=True))
    return found


def _records(bus: Bus, start: Mapping[Partition, int]) -> Iterator[RawRecord]:
    """What is committed now, from `start` on."""
    ends = {p: end for p, end in bus.ends(next(iter(start)).topic).items() if end > start[p]}
    until_s = time.monotonic() + READ_DEADLINE_S
    with bus.reader(start) as reader:
        while any(reader.positions()[partition] < end for partition, end in ends.items()):
            if raws := reader.poll(500, 0.2):
                until_s = time.monotonic() + READ_DEADLINE_S
                yield from raws
            elif time.monotonic() > until_s:
                where = ", ".join(map(str, ends))
                raise DeadlineError(f"reading {where}: nothing came for {READ_DEADLINE_S:g} s")
