"""Witnesses of a ledger's length: other proofs in the log and on disk that steps were made.

A step is committed before its version is announced, before its checkpoint is written, and before
anything is scored under it. So a later version than the ledger's proves that the end of `steps` is
gone: Kafka truncates a log at its first damaged batch, and the run would go on from there, train
samples again and set aside those made under the missing versions.
"""

from __future__ import annotations

from pathlib import Path

from rlstreams.schemas.events import PolicyPublished, ScoredTrajectory
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import POLICY_VERSIONS, SCORED, STEPS
from rlstreams.workers.loop.foreign import events_now, near_end
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore

NUM_SCORES = 32  # offsets looked at before the end of each partition


def check_tail(bus: Bus, ledger: Ledger, run: str, run_folder: Path) -> None:
    """Check that no witness knows of a later step than `steps`.

    Raises:
        ConfigError: names the newest step of each witness that does, and the way to go on.
        DeadlineError: a topic could not be read.
    """
    newest = max(ledger.last_step, ledger.last_void_step)
    found: list[str] = []
    manifests = CheckpointStore(run_folder / "checkpoints").manifests()
    saved = next((m for m in manifests if m.run == run and m.step > newest), None)
    if saved is not None:
        found.append(f"checkpoint {saved.name} is of step {saved.step}")
    published = events_now(bus, bus.beginnings(POLICY_VERSIONS.name), PolicyPublished, "trainer")
    later = [event for event in published if event.step > newest]
    scored = _scored(bus) if later else {}
    # An announcement under an epoch that was never claimed is forged, unless samples were scored
    # so.
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
            "`rlstreams export model RUN --out DIR`, then `--model.path=DIR --run.id=NAME`"
        )


def _scored(bus: Bus) -> dict[int, str]:
    """Hash by version of the weights that scored the newest samples."""
    start = near_end(bus, SCORED.name, NUM_SCORES)
    return {
        score.policy_version: score.weight_hash
        for event in events_now(bus, start, ScoredTrajectory, "trainer")
        for score in event.scores
    }
