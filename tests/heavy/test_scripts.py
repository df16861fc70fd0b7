"""Scripts that measure: each starts, and those that a CPU can try do their first steps there.

They run on GPUs and now and then; a function that they call and that changes would break them
unseen. `tests.gpu.end_to_end --cpu`, which needs a broker, has the marker `slow`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests/gpu", "tests/bench")
SCRIPTS = [
    f"{folder.replace('/', '.')}.{path.stem}"
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("*.py"))
]
LIMIT_S = 240.0
SMALL = ["--vocabulary", "256", "--device", "cpu"]
# What a CPU does of each: words, and what must be in the JSON that `--out` names.
TRIED: dict[str, tuple[list[str], str]] = {
    "parallel_train": (
        [*SMALL, "--shape", "tiny", "--folder", "{}/tiny", "--ranks", "1", "--length", "48",
         "--prompt", "8", "--sequences", "3", "--steps", "1", "--dtype", "float32",
         "--threads", "1"],
        "runs",
    ),
    "megatron_steps": (
        [*SMALL, "--small", "--folder", "{}", "--gpus", "1", "--length", "48", "--prompt", "8",
         "--sequences", "3", "--steps", "1", "--dtype", "float32", "--threads", "1"],
        "dense one",
    ),
    "train_step": (
        [*SMALL, "--shape", "tiny", "--samples", "3", "--length", "48", "--prompt", "8",
         "--bin", "128", "--steps", "1", "--cases", "padded", "--lengths", "constant"],
        "",
    ),
}  # fmt: skip


def module_of(name: str) -> Any:
    if name.endswith("peer_trl"):
        pytest.importorskip("trl")
    return importlib.import_module(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_begins(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it imports is there, and its command line can be read."""
    module = module_of(name)
    if "ArgumentParser" not in Path(module.__file__).read_text(encoding="utf-8"):
        return
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert 0 == ended.value.code
    assert "usage: " in capsys.readouterr().out


def run(name: str, words: list[str], limit_s: float = LIMIT_S) -> str:
    """What it prints; it ends with status 0."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{name}", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert 0 == done.returncode, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", TRIED)
def test_a_script_measures_on_a_cpu(name: str, tmp_path: Path) -> None:
    """A toy's figures are worthless; that there are some is not."""
    if name == "megatron_steps":
        pytest.importorskip("megatron.core")
    words, key = TRIED[name]
    out = tmp_path / "out.json"
    run(name, [*(word.replace("{}", str(tmp_path)) for word in words), "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found[key] if key else found


@pytest.mark.slow
def test_two_places_for_log_probs_end_to_end(tmp_path: Path) -> None:
    """Each case has its file, with an audit that is clean and a line for each step."""
    words = ["--cpu", "--shape", "tiny", "--vocabulary", "512", "--steps", "3", "--samples", "16"]
    words += ["--tokens", "16", "--prompt", "16", "--cases", "auto,off", "--least-s", "1"]
    told = run("end_to_end", [*words, "--folder", f"{tmp_path}/f", "--out", f"{tmp_path}/out"], 600)
    for case in ("auto", "off"):
        file = tmp_path / "out" / f"end_to_end-{case}.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        assert (0, True) == (found["status"], found["audit_ok"]), told
        assert 3 == len(found["timeline"]["steps"])
        scored = [row["scored"][1] for row in found["timeline"]["steps"]]
        begun = [row["begins"] for row in found["timeline"]["steps"]]
        assert all(last <= start for last, start in zip(scored, begun, strict=True))
