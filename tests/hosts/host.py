"""Hosts made of containers: each has its own network, host name, processes and files.

Of this machine a host sees its system and its Python environment, read-only; it runs what is
installed here, and needs no image but an empty one. With `ROLES_IMAGE`, the name of an image as
`infra.hosts.image` builds it, it runs that and sees nothing. It shares no folder with another host.
"""

from __future__ import annotations

import io
import json
import os
import sys
import sysconfig
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import docker
from docker.errors import NotFound
from docker.models.containers import Container, ExecResult
from docker.models.images import Image
from docker.models.networks import Network

from tests.containers import OWNER, ROOT

IMAGE = "rlstreams-host:empty"
HOME = "/srv"  # configuration, model and data, copied there
RUNS = "/var/lib/rlstreams"
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def host_image(client: docker.DockerClient) -> Image:
    """A file system with places to mount the system of this machine on, and nothing in them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("etc", "usr", "proc", "sys", "dev", "root", HOME[1:], RUNS[1:]):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        temporary = tarfile.TarInfo("tmp")
        temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(temporary)
        for name in _SYSTEM:
            if (path := Path("/") / name).is_symlink():
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, os.readlink(path)
                tar.addfile(link)
        users = b"root:x:0:0:root:/root:/bin/sh\n"
        file = tarfile.TarInfo("etc/passwd")
        file.size = len(users)
        tar.addfile(file, io.BytesIO(users))
    answer = client.api.import_image_from_data(buffer.getvalue(), *IMAGE.split(":"))
    return client.images.get(json.loads(answer.splitlines()[-1])["status"])


def mounts() -> dict[str, dict[str, str]]:
    """What a host sees of this machine, read-only: the system, Python and our packages."""
    system = ["/usr", *(f"/{name}" for name in _SYSTEM if not Path(f"/{name}").is_symlink())]
    python = [sys.prefix, sys.base_prefix, str(ROOT / "rlstreams")]
    paths = [path for path in (*system, "/etc/ld.so.cache", *python) if Path(path).exists()]
    return {path: {"bind": path, "mode": "ro"} for path in paths}


class Host:
    """One host; `start` it, and `remove` it in the end.

    Args:
        command: what its first process runs, by /bin/sh.
        files: what lies under `HOME`, by path; folders of this machine or bytes.
    """

    def __init__(
        self,
        client: docker.DockerClient,
        network: Network,
        name: str,
        command: str,
        files: Mapping[str, Path | bytes],
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self._network = network
        scripts = sysconfig.get_path("scripts")
        image = os.environ.get("ROLES_IMAGE", "")
        ours = {} if image else {"PATH": f"{scripts}:/usr/bin:/bin", "HOME": "/root"}
        self.container: Container = client.containers.create(
            image or host_image(client),
            ["/bin/sh", "-c", command],
            name=f"{network.name}-{name}",
            hostname=name,
            labels={OWNER: str(os.getpid())},
            network=network.name,
            networking_config={
                network.name: client.api.create_endpoint_config(aliases=[name]),
            },
            volumes={} if image else mounts(),
            working_dir=HOME,
            init=False,
            environment={
                **ours,
                "OMP_NUM_THREADS": "1",
                **environment,
            },
        )
        self.put(files)

    def put(self, files: Mapping[str, Path | bytes]) -> None:
        """Lay files under `HOME`, over those that are there."""
        self.container.put_archive(HOME, _archive(files))

    def start(self) -> None:
        """Also after `kill`: its files are as they were, its address may be another."""
        self.container.start()

    def kill(self) -> None:
        """Every process of it, SIGKILL."""
        self.container.kill()

    def cut_off(self) -> None:
        """It lives and reaches nobody."""
        self._network.disconnect(self.container)

    def join_again(self) -> None:
        """Back on the network under its name."""
        self._network.connect(self.container, aliases=[self.name])

    def run(self, *words: str) -> ExecResult:
        """A command on it, to its end; both outputs together."""
        return self.container.exec_run(list(words), workdir=HOME)

    @property
    def is_running(self) -> bool:
        """Whether its first process lives."""
        self.container.reload()
        return bool(self.container.status == "running")

    def log(self, num_lines: int | str = "all") -> str:
        """What its roles wrote to stderr."""
        return self.container.logs(tail=num_lines).decode("utf-8", "replace")

    def remove(self) -> None:
        """With all that it holds; idempotent."""
        try:
            self.container.remove(force=True, v=True)
        except NotFound:
            return


def _archive(files: Mapping[str, Path | bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            if isinstance(content, Path):
                tar.add(content, name)
                continue
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def roles(commands: Sequence[str]) -> str:
    """A shell line that keeps each of these roles (`ROLE [OPTIONS]`) with the demo's files."""
    kept = [
        f'sh keep.sh {role} demo.toml hosts.toml {" ".join(options)} & kept="$kept $!";'
        for role, *options in (command.split() for command in commands)
    ]
    # A signal ends the first wait.
    return " ".join(["kept=;", *kept, "trap 'kill -TERM $kept' TERM;", "wait; wait"])
