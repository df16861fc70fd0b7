"""`rlstreams record`: copies a run's topics into a folder, and its weights and checkpoints."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rlstreams.schemas.events import TrainerStarted
from rlstreams.streams.log.bus import Bus, existing
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.errors import BrokerError, DeadlineError, OffsetGoneError
from rlstreams.streams.recording import RecordedTopic, Recording, RecordingManifest, RecordingWriter
from rlstreams.streams.recording.recorder import DONE, ORDER, Recorder, RecordingProgress
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.host import version_of

WEIGHTS, CHECKPOINTS = "weights", "checkpoints"
QUIET_S = 5.0  # without a record after the trainer is done: a last evaluation may still come
_LIBRARIES = ("rlstreams", "pyarrow", "confluent-kafka", "numpy")
_POLL_S = 0.2
_COPY_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """Contents and folder of a recording to be made."""

    folder: Path
    is_followed: bool = False
    with_weights: bool = False
    with_checkpoints: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingResult:
    """Manifest and counts of a finished recording."""

    manifest: RecordingManifest
    num_records: int  # in the whole recording
    num_new: int  # records added by this process
    num_bytes: int  # of values, read by this process
    seconds: float
    is_resumed: bool


def record(
    bus: Bus,
    config: RunConfig,
    options: RecordingOptions,
    *,
    stopped: Callable[[], bool] = lambda: False,
    on_progress: Callable[[RecordingProgress], None] = lambda _: None,
) -> RecordingResult:
    """Record to the end of the topics, or until the run is done; seal.

    Raises:
        RecordingError: the folder cannot be used.
        DeadlineError, OffsetGoneError: the log does not deliver what is asked for.
    """
    started_s = time.monotonic()
    last = RecordingProgress(num_records=0, num_bytes=0, behind=0)

    def progress(now: RecordingProgress) -> None:
        nonlocal last
        last = now
        on_progress(now)

    copies = Copies(Path(config.folder), options)
    manifest = _manifest(bus, config)
    with RecordingWriter(options.folder, manifest) as writer:
        with Recorder(bus, writer, on_progress=progress) as recorder:
            try:
                if options.is_followed:
                    _follow(recorder, copies, stopped)
                recorder.up_to_now()
            except (BrokerError, DeadlineError, OffsetGoneError):
                recorder.commit()  # a later process goes on behind the records read so far
                copies.take(is_last=True)
                if not (options.is_followed and recorder.trainer_state == DONE):
                    raise  # the broker of a run that is over may be stopped
            copies.take(is_last=True)
        sealed = writer.seal(extra=_with_claim(writer))
    return RecordingResult(
        manifest=sealed,
        num_records=sum(topic.num_records for topic in sealed.topics.values()),
        num_new=last.num_records,
        num_bytes=last.num_bytes,
        seconds=time.monotonic() - started_s,
        is_resumed=writer.is_resumed,
    )


def _follow(recorder: Recorder, copies: Copies, stopped: Callable[[], bool]) -> None:
    """Record until the run is done and quiet, or `stopped`."""
    last_news_s = time.monotonic()
    while not stopped():
        num = recorder.step(_POLL_S)
        copies.take()
        if num or recorder.trainer_state != DONE:
            last_news_s = time.monotonic()
        elif time.monotonic() - last_news_s > QUIET_S:
            return


class Copies:
    """Weights and checkpoints of the run's folder, copied as they appear; a file has one content.

    The run removes versions and checkpoints as new ones come, so a live run's folder is listed
        once a second.
    """

    def __init__(self, run_folder: Path, options: RecordingOptions) -> None:
        names = {WEIGHTS: options.with_weights, CHECKPOINTS: options.with_checkpoints}
        self._pairs = [
            (run_folder / name, options.folder / name)
            for name, is_wanted in names.items()
            if is_wanted
        ]
        self._next_s = 0.0

    def take(self, *, is_last: bool = False) -> None:
        """Copy new files, at most once in `_COPY_EVERY_S`; the last time at once."""
        if time.monotonic() < self._next_s and not is_last:
            return
        self._next_s = time.monotonic() + _COPY_EVERY_S
        for source, target in self._pairs:
            for path in _whole_files(source):
                _copy(path, target / path.relative_to(source))


def _whole_files(folder: Path) -> Iterable[Path]:
    """Yield files with their final names: weights and the files of checkpoints."""
    yield from sorted(folder.glob("v*.safetensors"))
    yield from sorted(p for p in folder.glob("[0-9]*/*") if p.is_file())


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        shutil.copyfile(source, temporary)
    except FileNotFoundError:  # removed by the run meanwhile: it was no longer the newest
        temporary.unlink(missing_ok=True)
        return
    temporary.rename(target)


def _manifest(bus: Bus, config: RunConfig) -> RecordingManifest:
    names = [topic.name for topic in existing(bus, ORDER)]
    ids = bus.topic_ids(names)
    return RecordingManifest(
        run=config.run.id,
        started_at_ms=now_ms(),
        cluster_id=bus.cluster_id(),
        config=resolved_json(config),
        versions=_versions(),
        topics={
            name: RecordedTopic(id=ids[name], partitions=bus.partitions(name)) for name in names
        },
    )


def _versions() -> dict[str, str]:
    found = {name: version_of(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), "machine": platform.machine(), **found}


def _with_claim(writer: RecordingWriter) -> RecordingManifest:
    """Return the manifest, with data, tokenizer, model and libraries of the newest claim."""
    with Recording(writer.folder) as recording:
        claims = [record.event for record in recording.events(TrainerStarted)]
    if not claims:
        return writer.manifest
    newest = max(claims, key=lambda claim: claim.epoch)
    trained = {f"trainer.{name}": value for name, value in newest.versions.items()}
    return replace(
        writer.manifest,
        config=newest.config,
        hashes=newest.hashes,
        versions=writer.manifest.versions | trained,
    )
