"""Models by name: what is on this machine is found without a connection; what is not, is said."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.hub import found_folder

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "infra/examples/demo/model"
PROGRAM = """
import sys
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.hub import found_folder, model_folder
from rlstreams.check.doctor.model import read_model
try:
    print(found_folder(sys.argv[1]), read_model(sys.argv[1]).num_parameters)
except ConfigError as err:
    print(err)
"""


def cached(home: Path, repository: str, commit: str) -> Path:
    """A model as the hub's client keeps it under `HF_HOME`."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    shutil.copytree(MODEL, snapshot)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(commit)
    return snapshot


def told(home: Path, *names: str, program: str = PROGRAM, endpoint: str = "") -> str:
    """In a process of its own: the client reads its variables when it is imported."""
    hub = {"HF_ENDPOINT": endpoint} if endpoint else {"HF_HUB_OFFLINE": "1"}
    environment = {"HF_HOME": str(home), "PATH": "/usr/bin:/bin", **hub}
    return subprocess.run(
        [sys.executable, "-c", program, *names],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


def test_a_fetched_model_is_found_by_its_name(tmp_path: Path) -> None:
    """Of the newest commit that is here, or of the revision that was asked for."""
    snapshot = cached(tmp_path, "some/model", "a" * 40)
    assert f"{snapshot} 263616" == told(tmp_path, "hf:some/model")
    assert f"{snapshot} 263616" == told(tmp_path, f"hf:some/model@{'a' * 40}")


def test_a_model_that_cannot_be_fetched_is_said(tmp_path: Path) -> None:
    """With its name, and the ways out."""
    said = told(tmp_path, "hf:some/model")
    assert "model.path: hf:some/model cannot be fetched" in said
    assert "or name a folder" in said


def test_a_hub_that_does_not_answer_is_said_in_plain_words(tmp_path: Path) -> None:
    """The client begins with "Got:", which says nothing in a sentence of ours."""
    said = told(tmp_path, "hf:some/model", endpoint="http://127.0.0.1:9")
    assert "hf:some/model cannot be fetched: ConnectError: " in said


@pytest.mark.parametrize(
    ("name", "expected"),
    [("", r"model\.path is empty"), ("hf:", "must be a folder or hf:ORG/NAME"),
     ("hf:only-a-name", r"got 'hf:only-a-name'"), ("hf:a/b/c", "got 'hf:a/b/c'")],
)  # fmt: skip
def test_a_name_that_cannot_be_one(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        found_folder(name)
