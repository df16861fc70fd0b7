"""Our plugin for model servers laid out as a folder that a server finds by `PYTHONPATH`.

The same files that `pip install infra/server` installs, under the same names, with the entry point
that vLLM looks for. Nothing is built or downloaded.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NAME = "rlstreams_server"
VERSION = "0.1.0"
_METADATA = f"Metadata-Version: 2.1\nName: rlstreams-server\nVersion: {VERSION}\n"
_ENTRY_POINTS = f"[vllm.general_plugins]\nrlstreams = {NAME}.vllm:register\n"


def lay_out(folder: Path) -> Path:
    """Write the package and its metadata under `folder`, in place of older ones."""
    package = folder / NAME
    shutil.rmtree(package, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(__file__).parent / "link", package, ignore=ignore)
    info = folder / f"{NAME}-{VERSION}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA, encoding="utf-8")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Environment variables for the start of a server; lays the plugin out first.

    `PYTHONPATH` goes before this process's own; `NCCL_CUMEM_ENABLE` is as engines set it.
    """
    path = [str(lay_out(folder).resolve())]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    return {"PYTHONPATH": os.pathsep.join(path), "NCCL_CUMEM_ENABLE": "0"}
