"""Checks of the machine: Java and jars, disk, a free port, open files, threads."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlstreams.check.doctor.check import EVERYTHING, Check, Host, fail, ok, probed, warn
from rlstreams.check.doctor.devices import MOMENTS_ALONE
from rlstreams.streams.log.roles import STAGES
from rlstreams.streams.log.topics import TOPICS
from rlstreams.streams.process.descriptors import raise_limit
from rlstreams.workers.bootstrap.parts import topic_plan
from rlstreams.workers.config.run import RunConfig

LOG_MB = 2000  # of a run on a small model; a log grows with its samples
# Open at once in the broker's process, measured: its own, of a partition, of a worker's clients.
_BROKER_FILES, _PARTITION_FILES, _WORKER_FILES = 100, 2, 4
_ROLE_FILES = 128  # of `up`, and of any role
# Tried with `prlimit --nproc`: the demo alone has as many at once on two cores; with 150 it ends.
_THREADS = 245
_KERNELS = "TORCHINDUCTOR_CACHE_DIR"
_LONG_FILES = 4096  # each 64 MB of a partition are a file, which stays open
_OR_YOURS = "or set broker.bootstrap to your own broker; then none is needed"


def machine(
    config: RunConfig, host: Host = EVERYTHING, *, is_broker_up: bool, weights_mb: float
) -> list[Check]:
    """Checks that need neither data nor model nor broker nor GPU.

    Args:
        is_broker_up: the run's embedded broker runs already, and so holds its port.
        weights_mb: size of the model in float32.
    """
    checks = []
    if not config.broker.bootstrap and not host.is_alone:
        checks += [
            *probed("java", java, _OR_YOURS),
            *probed("jars", lambda: jars(config.broker.jars_dir), _OR_YOURS),
            port(config.broker.port, is_broker_up=is_broker_up),
        ]
    found = [files(config, host), *threads(), *compiler_cache()]
    return [*checks, *found, disk(config, weights_mb, host)]


def java() -> Check:
    """A Java runtime for the embedded broker."""
    from rlstreams.streams.broker.java import find_java, java_version

    path = find_java()
    return ok("java", f"{java_version(path)} at {path}")


def jars(jars_dir: str) -> Check:
    """The jars of the embedded broker; nothing is fetched here."""
    from rlstreams.streams.broker.jars import KAFKA_VERSION, classpath, num_missing
    from rlstreams.streams.log.cache import cache_folder

    if jars_dir:
        found = classpath(jars_dir)
        return ok("jars", f"Apache Kafka {KAFKA_VERSION}: {len(found)} jars in {jars_dir}")
    folder, missing = cache_folder() / "jars", num_missing()
    if missing:
        lacking = f"{missing} jars of Apache Kafka {KAFKA_VERSION} are not in {folder}"
        there = _nearest(folder)
        if not os.access(there, os.W_OK):
            advice = (
                "name a folder that you may write in RLSTREAMS_CACHE, or one that holds them in "
            )
            return fail(
                "jars", f"{lacking}, and {there} is not writable", f"{advice}broker.jars_dir"
            )
        return warn(
            "jars",
            lacking,
            "the first start fetches them (about 45 MB); without a connection name a folder that "
            "holds them in broker.jars_dir",
        )
    return ok("jars", f"Apache Kafka {KAFKA_VERSION}: all in {folder}")


def files(config: RunConfig, host: Host = EVERYTHING) -> Check:
    """Check how many files a process may have open, against what broker and roles need."""
    limit, needed, long = raise_limit(), _ROLE_FILES, 0
    if not config.broker.bootstrap and not host.is_alone:
        plan = topic_plan(config)
        partitions = sum(plan.partitions(topic) for topic in TOPICS)
        workers = sum(host.num_processes(config, role) for role in STAGES)
        needed = _BROKER_FILES + _PARTITION_FILES * partitions + _WORKER_FILES * workers
        needed, long = max(needed, _ROLE_FILES), _LONG_FILES
    holder = "the broker has" if long else "a role has up to"
    found = f"a process may have {limit} files open, and {holder} {needed} from its start on"
    advice = f"raise the hard limit to {max(long, 1024)}: ulimit -Hn, LimitNOFILE, --ulimit nofile"
    if limit < needed:
        return fail("files", found, advice)
    more = "; a long run more, one for each 64 MB of a partition"
    return warn("files", found + more, advice) if limit < long else ok("files", found)


def threads() -> Iterator[Check]:
    """Check how many threads this user may have, in all processes; where there is no limit, not.

    Java, Kafka's client and torch name no limit when they get no thread.
    """
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY or not os.geteuid():  # root has none
        return
    found = f"this user may have {limit} threads; the smallest run has {_THREADS} at once"
    advice = "raise the limit: ulimit -u, LimitNPROC, --ulimit nproc"
    yield fail("threads", found, advice) if limit < _THREADS else ok("threads", found)


def port(number: int, *, is_broker_up: bool) -> Check:
    """Check that the embedded broker can listen at its configured port."""
    from rlstreams.streams.broker.ports import is_free

    if is_broker_up:
        return ok("port", "the run's broker is up and has its own")
    if not number:
        return ok("port", "broker.port is 0: a free one is chosen")
    if not is_free(number):
        found = f"broker.port {number} is in use by another program"
        return fail("port", found, "choose another one, or 0 for a free one")
    return ok("port", f"broker.port {number} is free")


def disk(config: RunConfig, weights_mb: float, host: Host = EVERYTHING) -> Check:
    """Free space where the run's folder is or will be, against what it will hold.

    A checkpoint is weights and two moments in float32; a served version is weights.
    """
    there = _nearest(Path(config.folder).absolute())
    if not there.is_dir() or not os.access(there, os.W_OK):
        wrong = "not writable" if there.is_dir() else "a file, not a folder"
        return fail("disk", f"{there} is {wrong}", "name another folder in run.dir")
    free_mb = shutil.disk_usage(there).free / 1e6
    needed_mb = 0.0 if host.is_alone else float(LOG_MB)
    if host.has("trainer"):
        checkpoints = 3 * (config.trainer.checkpoints_kept + 1)
        needed_mb += weights_mb * (checkpoints + config.weights.versions_served + 1)
    found = f"{free_mb / 1000:.1f} GB free at {there}; about {needed_mb / 1000:.1f} GB are needed"
    if config.trainer.optimizer.is_own and host.has("trainer"):
        found += f", {MOMENTS_ALONE}"
    advice = "free some, name another folder in run.dir, or lower trainer.checkpoints_kept"
    if free_mb < needed_mb / 4:
        return fail("disk", found, advice)
    return warn("disk", found, advice) if free_mb < needed_mb else ok("disk", found)


def _nearest(folder: Path) -> Path:
    """Return the folder, or the one above it that is there."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def compiler_cache() -> Iterator[Check]:
    """Check that torch can make the folder that was named for its compiled kernels: it cannot be
    imported without. A kernel that finds no room there is left out."""
    if not (folder := os.environ.get(_KERNELS, "")):
        return
    name, found = "compiler cache", f"{_KERNELS} is {folder!r}"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as err:
        why = f"{found}, which cannot be made ({err.strerror})"
        yield fail(name, why, "name a folder that you may write")
    else:
        yield ok(name, found)
