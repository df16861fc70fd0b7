"""Roles by hand: the lines of infra/docs/by-hand.md, as written, each role in its own process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.command import ROOT
from tests.ports import free_ports
from tests.readme_blocks import blocks

DEADLINE_S = 240
ROLES = ("prompts", "rollout", "logprob", "trainer")


def test_ten_lines_start_a_run_in_four_terminals(tmp_path: Path) -> None:
    """To its end; each role says what it does, the trainer how each step went."""
    (block,) = blocks((ROOT / "infra/docs/by-hand.md").read_text("utf-8"))
    text = block.text.replace("9092", str(free_ports(1)[0]))
    lines = [line.partition("  #")[0].rstrip() for line in text.splitlines()]
    assert 10 == len(lines)
    workers = [line for line in lines if " worker " in line]
    assert [*ROLES] == [line.split()[2] for line in workers]
    before, audit = lines[: lines.index(workers[0])], lines[-1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path}
    started: list[subprocess.Popen[str]] = []
    folder = tmp_path / "sums"

    def said(line: str, cwd: Path) -> str:
        done = subprocess.run(line, shell=True, cwd=cwd, env=env, timeout=DEADLINE_S, check=True,
                              capture_output=True, text=True)  # fmt: skip
        return done.stdout + done.stderr

    said(before[0], tmp_path)
    try:
        for line in before[2:]:
            said(line, folder)
        config = (folder / "run.toml").read_text("utf-8")
        (folder / "run.toml").write_text(re.sub("steps = 60", "steps = 3", config), "utf-8")
        for line, role in zip(workers, ROLES, strict=True):
            with (folder / f"{role}.log").open("w") as log:
                words = f"exec {line}"
                started.append(subprocess.Popen(words, shell=True, cwd=folder, env=env, text=True,
                                                stdout=log, stderr=log))  # fmt: skip
        assert 0 == started[-1].wait(DEADLINE_S), (folder / "trainer.log").read_text("utf-8")
        assert "ok: every sample accounted for" in said(audit, folder)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(DEADLINE_S)
        said("rlstreams broker stop --dir broker", folder)
    logs = {role: logged(folder / f"{role}.log") for role in ROLES}
    for role, found in logs.items():
        assert any(line["event"] == "state" and line["state"] for line in found), role
    steps = [line for line in logs["trainer"] if line["event"] == "step_completed"]
    assert [1, 2, 3] == [line["step"] for line in steps]
    assert all(0 <= line["reward"] <= 1 for line in steps)


def logged(path: Path) -> list[dict[str, object]]:
    """The lines of a worker's log; what libraries write there is no JSON."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line[:1] == "{"]
