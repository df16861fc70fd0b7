"""The broker's classes, read and verified once: an archive that each later JVM maps (Java's CDS).

It halves the cost of a start, and no start needs it. A JVM passes over an archive that another
Java, other jars or damage have made useless. A process beside a broker that started without one
makes it, of the classes that this broker has loaded; it ends with the broker's starter.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rlstreams.streams.broker.config import ENVIRONMENT
from rlstreams.streams.log.cache import cache_folder
from rlstreams.streams.log.owner_lock import OwnedError, held
from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.streams.process.priority import COMPUTES

KEPT = 4  # archives of 60 MB, for other Javas and the version before
AFTER_S = 20.0  # a broker has met clients, groups and transactions by then; a short look is over
_CLASSES = "classes.lst"  # in the broker's folder, until the archive is made
# The last line may be half written. A JVM crashes on an archive that was cut short, so the name
# holds its size; other damage the JVM finds by its checksums.
_MAKE = """
sleep "$1"
sed '$d' "$2" >"$3.lst" &&
"$4" -Xshare:dump -Xmx512m -XX:+UseSerialGC -XX:SharedClassListFile="$3.lst" \
    -XX:SharedArchiveFile="$3.new" -cp "$5" &&
mv "$3.new" "$3-$(($(wc -c <"$3.new"))).jsa"
rm -f "$2" "$3.lst" "$3.new"
"""


class ClassArchive:
    """The archive of one Java and its jars, for one user: a foreign user's file is not mapped."""

    def __init__(self, java: Path, jars: Sequence[Path]) -> None:
        self._java = java
        self._jars = [path.resolve() for path in jars]
        digest = hashlib.sha256(str(os.getuid()).encode())
        for path in (java.resolve(), *self._jars):
            found = path.stat()
            digest.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
        self.name = cache_folder().resolve() / "classes" / digest.hexdigest()[:16]
        """Path of its files without suffix; the archive's name goes on with its size."""

    def options(self, folder: Path) -> tuple[str, ...]:
        """Return JVM options of the broker in `folder`: map the archive, or list its classes."""
        if ":" in str(self.name):
            return ()  # Java would read two paths
        if not (path := self.path()):
            return (f"-XX:DumpLoadedClassList={folder.resolve() / _CLASSES}",)
        with contextlib.suppress(OSError):
            path.touch()
        return (f"-XX:SharedArchiveFile={path}", "-XX:+VerifySharedSpaces")

    def making(self, folder: Path, after_s: float = AFTER_S) -> Child | None:
        """Start a process that makes the archive of the classes that the broker in `folder` loads.

        It ends with this process. None: the archive is there, is being made, or cannot be kept.
        """
        classes = folder / _CLASSES
        if self.path() or not classes.is_file():
            return None
        jars = ":".join(map(str, self._jars))
        words = (f"{after_s:g}", str(classes), str(self.name), str(self._java), jars)
        try:
            self.name.parent.mkdir(parents=True, exist_ok=True)
            with held(self.name.with_suffix(".lock"), wait_s=0) as fd:
                self._make_room()
                return Child.started(
                    ("sh", "-c", _MAKE, "sh", *words), orphaned=Orphaned.DIES, pass_fds=(fd,),
                    umask=0o077, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    environment=ENVIRONMENT, gives_way=COMPUTES,
                )  # fmt: skip
        except (OSError, OwnedError):
            return None

    def path(self) -> Path | None:
        """Return the archive's path, if it is there, whole and our own."""
        for path in self.name.parent.glob(f"{self.name.name}-*.jsa"):
            with contextlib.suppress(OSError):
                found = path.stat()
                if (path.stem, os.getuid()) == (f"{self.name.name}-{found.st_size}", found.st_uid):
                    return path
        return None

    def _make_room(self) -> None:
        """Remove all archives but those that were used last."""
        others = sorted(self.name.parent.glob("*.jsa"), key=lambda path: -path.stat().st_mtime)
        for path in others[KEPT - 1 :]:
            path.unlink(missing_ok=True)
