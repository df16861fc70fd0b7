"""`in_container.py` of the examples where there is podman alone: no Docker engine is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import head

SCRIPT = Path(__file__).parents[3] / "infra/examples/agent/in_container.py"
# Says what it was called with, and what it was given by name; ends as the command would.
ENGINE = f"""{head()}import json, os, sys

print(json.dumps([sys.argv[1:], os.environ["OPENAI_API_KEY"]]))
sys.exit(7)
"""


@pytest.mark.parametrize("engines", [("podman",), ("docker", "podman"), ()])
def test_podman_is_taken_where_there_is_no_docker(tmp_path: Path, engines: tuple[str, ...]) -> None:
    """Its status is the command's; without either, one line says so."""
    for name in engines:
        (tmp_path / name).write_text(ENGINE.replace("[sys.argv[1:]", f"[['{name}', *sys.argv[1:]]"))
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path), "OPENAI_API_KEY": "the-key",
                   "RLSTREAMS_TASK": str(tmp_path / "task.json")}  # fmt: skip
    command = [sys.executable, str(SCRIPT), "--image", "my/agent", "--", "python", "/solver.py"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60,
                          check=False)  # fmt: skip
    if not engines:
        assert (made.returncode, made.stderr.strip()) == (
            1, "in_container.py: there is neither docker nor podman here",
        )  # fmt: skip
        return
    words, key = json.loads(made.stdout)
    assert (made.returncode, words[:2], key) == (7, [engines[0], "run"], "the-key")
    assert words[-2:] == ["python", "/solver.py"]
    assert f"{tmp_path}/task.json:/rlstreams/task.json:ro" in words
    assert "the-key" not in words
