"""The pinned jars of Apache Kafka: fetched once, checked by SHA-256, kept in a cache folder.

Each locked coordinate is resolved by itself: a transitive resolution would pick other versions.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlstreams.streams.hashes import content_hash
from rlstreams.streams.log.cache import cache_folder
from rlstreams.streams.log.errors import BrokerError, ConfigError

KAFKA_VERSION = "4.2.1"
_MB_PER_JAR = 44.97 / 46  # the lock holds no sizes; the mean is good enough to announce
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Jar:
    """One line of the lock."""

    group: str
    artifact: str
    version: str
    sha256: str  # hex

    @property
    def file_name(self) -> str:
        """Name in every folder of jars."""
        return f"{self.artifact}-{self.version}.jar"

    @property
    def coordinate(self) -> str:
        """`group:artifact:version`."""
        return f"{self.group}:{self.artifact}:{self.version}"


def lock_file() -> Path:
    """The lock: inside the installed package, or in the checkout."""
    here = Path(__file__).resolve().parents[1]
    packaged = here / "data" / "jars.lock"
    return packaged if packaged.is_file() else here.parents[1] / "infra" / "kafka" / "jars.lock"


def locked(text: str) -> tuple[Jar, ...]:
    """The jars of a lock's text: lines of `group:artifact:version sha256:hex`.

    Raises:
        ConfigError: a line of another form; names the line.
    """
    jars = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        coordinate, _, digest = line.partition(" sha256:")
        if coordinate.count(":") != 2 or len(digest.strip()) != 64:
            raise ConfigError(f"jars.lock line {number}: not `group:artifact:version sha256:hex`")
        group, artifact, version = coordinate.split(":")
        jars.append(Jar(group=group, artifact=artifact, version=version, sha256=digest.strip()))
    return tuple(jars)


def classpath(jars_dir: str = "", say: Callable[[str], None] = lambda _: None) -> tuple[Path, ...]:
    """Paths of every locked jar, each with the locked content.

    Args:
        jars_dir: a folder that holds them all; nothing is fetched then. Empty: fetch and cache.
        say: called with a text on the jars and their size before a download starts.

    Raises:
        BrokerError: a jar is missing, cannot be fetched or has another content; names it.
    """
    jars = locked(lock_file().read_text(encoding="utf-8"))
    if jars_dir:
        if not Path(jars_dir).is_dir():
            raise BrokerError(
                f"broker.jars_dir is {jars_dir!r}, which is no folder on this machine; leave it "
                "empty to fetch the jars"
            )
        for jar in jars:
            check(Path(jars_dir) / jar.file_name, jar)
        return tuple(Path(jars_dir) / jar.file_name for jar in jars)
    folder = cache_folder() / "jars"
    if missing := _missing(jars):
        say(
            f"downloading {len(missing)} jars of Apache Kafka {KAFKA_VERSION} "
            f"(about {len(missing) * _MB_PER_JAR:.0f} MB) to {folder}"
        )
        _fetch(missing, folder)
    return tuple(folder / jar.file_name for jar in jars)


def num_missing() -> int:
    """Return the number of locked jars that the cache lacks or holds with another content."""
    return len(_missing(locked(lock_file().read_text(encoding="utf-8"))))


def check(path: Path, jar: Jar) -> None:
    """Compare one file with its line of the lock.

    Raises:
        BrokerError: not there, or another content.
    """
    if not path.is_file():
        raise BrokerError(f"jar {jar.coordinate}: {path} does not exist")
    found = content_hash(path)
    if found != jar.sha256:
        raise BrokerError(
            f"jar {jar.coordinate}: {path} has SHA-256 {found}, the lock says {jar.sha256}; "
            "it is not the file that was pinned"
        )


def _missing(jars: Sequence[Jar]) -> list[Jar]:
    folder = cache_folder() / "jars"
    paths = {jar: folder / jar.file_name for jar in jars}
    return [jar for jar, at in paths.items() if not at.is_file() or content_hash(at) != jar.sha256]


def _fetch(jars: Sequence[Jar], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise BrokerError(
            f"the jars cannot be kept in {folder}: {err.strerror}; name a folder that you may "
            "write in RLSTREAMS_CACHE, or one that holds them in broker.jars_dir"
        ) from err
    # A download that breaks off leaves a short file under its final name, so each process
    # downloads into a folder of its own and renames what it has checked.
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix="staging-"))
    try:
        with ThreadPoolExecutor(max_workers=8) as pool:
            try:
                for fetched in [pool.submit(_fetch_one, jar, staging, folder) for jar in jars]:
                    fetched.result()
            except BrokerError:
                pool.shutdown(cancel_futures=True)  # one failure names the cause well enough
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch_one(jar: Jar, staging: Path, folder: Path) -> None:
    from jgo.maven import MavenContext

    problem: Exception | None = None
    for attempt in range(_TRIES):
        repository = staging / str(attempt)
        project = MavenContext(repo_cache=repository).project(jar.group, jar.artifact)
        try:
            path = project.at_version(jar.version).artifact().resolve()
        except (OSError, RuntimeError) as error:  # jgo raises errors of requests, or RuntimeError
            problem = error
            continue
        check(path, jar)
        path.replace(folder / jar.file_name)
        return
    raise BrokerError(
        f"jar {jar.coordinate}: cannot be fetched ({problem}); without a connection, put the "
        f"{KAFKA_VERSION} jars into a folder and name it in broker.jars_dir"
    ) from problem
