"""Slurm's commands as far as `infra/hosts/slurm.sh` calls them, for processes of one machine.

`srun` runs its command in the foreground, with the node's name; `scontrol` knows the nodes, and
notes that a job is to be queued again.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "infra/hosts/slurm.sh"
_SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do
    case $1 in --nodelist=*) export STUB_NODE=${1#*=} ;; esac
    shift
done
echo "$STUB_NODE $*" >> "$STUB_FOLDER/steps"
exec "$@"
"""
_SCONTROL = """#!/bin/bash
case "$1 $2" in
"show hostnames") tr , '\\n' <<< "$3" ;;
requeue*) echo "$2" >> "$STUB_FOLDER/requeued" ;;
*) exit 1 ;;
esac
"""


class Slurm:
    """A folder with the stubs, in which jobs run."""

    def __init__(self, folder: Path, nodes: Sequence[str], commands: Mapping[str, str]) -> None:
        """
        Args:
            commands: more stubs, by name.
        """
        self.folder, self._nodes = folder, nodes
        self._bin = folder / "bin"
        self._bin.mkdir(parents=True)
        for name, text in {"srun": _SRUN, "scontrol": _SCONTROL, **commands}.items():
            (self._bin / name).write_text(text, "utf-8")
            (self._bin / name).chmod(0o755)

    def batch(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        """The batch script on its way, as `sbatch` starts it on the first node."""
        path = f"{self._bin}:{os.environ['PATH']}"
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": ",".join(self._nodes)}
        ours = {"PATH": path, "STUB_FOLDER": str(self.folder), "ADDRESS": "127.0.0.1", **slurm}
        with (self.folder / "output").open("wb") as output:
            return subprocess.Popen(
                ["bash", str(SCRIPT), *words],
                cwd=ROOT,
                env={**os.environ, **ours, "DIR": str(self.folder / "runs"), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def noted(self, name: str) -> list[str]:
        """Lines of a file that stubs write."""
        path = self.folder / name
        return path.read_text("utf-8").splitlines() if path.exists() else []
