"""`rlstreams` as somebody has it who installed the wheel: no clone, an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.command import ROOT, UP_S


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment that holds the wheel; what it needs is taken from the one that runs this."""

    environment: Path

    @classmethod
    def of(cls, folder: Path) -> Installed:
        """Build the wheel of this tree, as it is where there are no links, and install it."""
        beside = str(Path(sys.executable).with_name("uv"))
        found = shutil.which("uv") or beside  # pyenv's shim is found and does not run
        asked = subprocess.run([found, "--version"], capture_output=True, check=False)
        uv = beside if asked.returncode else found
        environment = folder / "environment"
        python = environment / "bin" / "python"
        _copy_without_links(folder / "tree")
        for words in (
            ["build", "--quiet", "--wheel", "--out-dir", f"{folder}/dist", f"{folder}/tree"],
            ["venv", "--quiet", "--python", sys.executable, str(environment)],
            ["pip", "install", "--quiet", "--no-deps", "--python", str(python), "--no-index",
             "--find-links", str(folder / "dist"), "rlstreams"],
        ):  # fmt: skip
            subprocess.run([uv, *words], check=True, capture_output=True, text=True)
        (site,) = environment.glob("lib/python*/site-packages")
        # Found after its own packages; the editable install there is not followed from here.
        (site / "needed.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n", "utf-8")
        return cls(environment)

    @property
    def packages(self) -> set[str]:
        """What the wheel puts into `site-packages`, its metadata aside."""
        (record,) = self.environment.glob("lib/python*/site-packages/rlstreams-*.dist-info/RECORD")
        tops = {line.split(",")[0].split("/")[0] for line in record.read_text("utf-8").splitlines()}
        return {top for top in tops if not top.endswith(".dist-info") and top != ".."}

    def run(self, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """A command in `folder`; both outputs in `stdout`."""
        path = f"{self.environment / 'bin'}:{os.environ['PATH']}"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run(
            words, cwd=folder, env={**environment, "PATH": path, "OMP_NUM_THREADS": "1"},
            timeout=UP_S, check=False, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip


def _copy_without_links(folder: Path) -> None:
    """The tree as Git writes it where it may make no links: a file that holds the link's target."""
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, text=True).splitlines():
        source, target = ROOT / name, folder / name
        if not source.exists():
            continue  # deleted and not yet committed
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.write_text(os.readlink(source), "utf-8")
        else:
            shutil.copy(source, target)
