"""How a command ends whose reader is gone, and how setup finds an installer that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Says something that nobody will read any more, and ends as a hang-up ends it.
HUNG_UP = """
import sys
from rlstreams import __main__ as ours
ours.main = lambda **_: (sys.stdout.write("unread"), sys.stderr.write(""), 129)[-1]
sys.exit(ours.console())
"""


def test_what_nobody_reads_any_more_does_not_change_the_status() -> None:
    """Python would end with 120, because it cannot flush."""
    theirs, ours = os.pipe()
    os.close(theirs)
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        [sys.executable, "-c", HUNG_UP],
        stdout=ours,
        stderr=subprocess.PIPE,
        env=buffered,
        check=False,
    )
    os.close(ours)
    assert (129, b"") == (ended.returncode, ended.stderr)


def test_a_uv_that_is_found_and_does_not_run_is_none(tmp_path: Path) -> None:
    """pyenv's shim of another Python's uv ends with 127."""
    shim, own = tmp_path / "shims" / "uv", tmp_path / "venv" / "bin" / "uv"
    for file, status in ((shim, 127), (own, 0)):
        file.parent.mkdir(parents=True)
        file.write_text(f"#!/bin/sh\nexit {status}\n")
        file.chmod(0o755)
    script = f"VENV={tmp_path}/venv LOCK= START=0 TORCH=; . infra/environment.sh; find_uv; echo $UV"
    path = {"PATH": f"{shim.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-eu", "-c", script], cwd=ROOT, env=path, capture_output=True, text=True, check=True
    )
    assert f"{own}\n" == done.stdout
    shim.write_text("#!/bin/sh\nexit 0\n")
    done = subprocess.run(
        ["sh", "-eu", "-c", script], cwd=ROOT, env=path, capture_output=True, text=True, check=True
    )
    assert "uv\n" == done.stdout


def test_a_clone_of_any_path_is_found_in_any_locale(tmp_path: Path) -> None:
    """A locale without its characters stops an older Python before the first line of ours."""
    clone = tmp_path / "Läufe (alte)"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    (site,) = (clone / ".venv/lib").glob("python3.*/site-packages")
    (site / "_editable_impl_rlstreams.pth").write_text(f"{clone}\n", encoding="utf-8")
    (clone / "ours.py").write_text("")
    script = ". infra/environment.sh; name_by_relative_path"
    for variables, command in (
        ({"VENV": str(clone / ".venv")}, ["sh", "-eu", "-c", script]),
        ({"LC_ALL": "C"}, [clone / ".venv/bin/python", "-c", "import ours"]),
    ):
        subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=True)
