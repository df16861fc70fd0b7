"""The log-prob worker's GPU, and the shifts of two processes that compute on one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.owner_lock import take
from rlstreams.workers.bootstrap import gpus
from rlstreams.workers.config.load import load
from rlstreams.workers.engines import gpu_shifts
from rlstreams.workers.engines.gpu_shifts import GpuShifts
from rlstreams.workers.model import device
from rlstreams.workers.model.base import VISIBLE

EXAMPLES = Path(__file__).parents[3] / "infra/examples"
TWO = [EXAMPLES / "gsm8k-2gpu.toml"]
TO_THE_SERVER = f"--engine.env.{VISIBLE}"


@pytest.mark.parametrize(
    ("words", "there", "expected", "why"),
    [
        ([], "01", "cuda:0", "it is the trainer's: no other GPU is free"),
        ([], "012", "cuda:2", "no other role computes there"),
        ([f"{TO_THE_SERVER}=1,2", "--engine.servers=2"], "012", "cuda:0", "the trainer's"),
        ([f"{TO_THE_SERVER}=1,2", "--engine.args.tp=2"], "0123", "cuda:3", "no other role"),
        (["--trainer.device=cuda:1", f"{TO_THE_SERVER}=4"], "45", "cuda:1", "the trainer's"),
        (["--trainer.device=cuda:1", f"{TO_THE_SERVER}=4"], "456", "cuda:2", "no other role"),
        (["--logprob.workers=2"], "0123", "cuda:2", "no other role"),
        (["--logprob.workers=2"], "012", "cuda:0", "the trainer's"),
        (["--logprob.device=cuda:1"], "012", "cuda:1", ""),
        (["--trainer.device=cpu", "--weights.channel=gloo"], "01", "cpu", "the trainer computes"),
        (['--engine.urls=["http://a:1"]'], "01", "cuda:1", "no other role"),
        (["--rollout.engine=builtin", "--rollout.device=cuda:1"], "01", "cuda:0", "the trainer's"),
    ],
)
def test_where_log_probs_are_computed(
    words: list[str], there: str, expected: str, why: str
) -> None:
    """Where nobody else computes; else beside the trainer; a name is taken as it is."""
    found, reason = load(TWO, words).scorer_on(list(there))
    assert expected == found
    assert reason.startswith(why) or why in reason
    assert bool(why) == bool(reason)


def test_a_device_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"logprob.device must be `auto`, .* got 'any'"):
        load(TWO, ["--logprob.device=any"])


def shifts(
    monkeypatch: pytest.MonkeyPatch, role: str, *words: str, mps: Path | None = None
) -> GpuShifts | None:
    monkeypatch.setattr(device, "visible_gpus", lambda: ["4", "6"])
    monkeypatch.setenv(gpus.MPS_PIPES, str(mps or "/nowhere"))
    given = [f"{TO_THE_SERVER}=6", *words]
    said = SimpleNamespace(info=lambda *_, **__: None)
    context: Any = SimpleNamespace(config=load(TWO, given), role=role, log=said)
    if role == "logprob":
        context.config = gpus.placed(context.config)
    return gpus.shifts_of(context)


def test_who_has_shifts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both of a GPU that they share, by its name on the host; nobody else."""
    for role in ("trainer", "logprob"):
        found = shifts(monkeypatch, role)
        assert found is not None
        assert found._now.name.endswith("shift-4.now")
        for words in (
            ["--logprob.device=cuda:1"],
            ["--trainer.ranks=2"],
            ["--logprob.place=off", "--trainer.loss.proximal=behavior",
             "--trainer.loss.correction=none"],
        ):  # fmt: skip
            assert shifts(monkeypatch, role, *words) is None
    (tmp_path / "control").touch()
    assert shifts(monkeypatch, "trainer", mps=tmp_path) is None
    both = ["--logprob.device=cuda:0", "--logprob.workers=2"]
    assert shifts(monkeypatch, "trainer", *both) is not None
    assert shifts(monkeypatch, "logprob", *both) is not None  # the first of them


# Nothing is computed: torch, which only says that there is no GPU, would take three CPU seconds.
WORK = """
import sys, time, types
from pathlib import Path
sys.modules["torch"] = types.SimpleNamespace(
    cuda=types.SimpleNamespace(is_available=lambda: False)
)
from rlstreams.workers.engines.gpu_shifts import GpuShifts
folder, name = Path(sys.argv[1]), sys.argv[2]
shifts = GpuShifts("0", print, folder=folder)
def bin():
    with (folder / "order").open("a") as file:
        file.write(f"{name} begins\\n"); file.flush()
        time.sleep(0.02)
        file.write(f"{name} ends\\n")
(folder / name).touch()
while len(list(folder.glob("?"))) < 2:
    time.sleep(0.001)
for _ in range(12):
    shifts.run(bin)
"""


def test_two_processes_compute_in_turn(tmp_path: Path) -> None:
    """Never at once; and none has the GPU for long while the other waits for it."""
    children = [
        subprocess.Popen([sys.executable, "-c", WORK, str(tmp_path), name]) for name in "ab"
    ]
    assert [0, 0] == [child.wait(240) for child in children]
    lines = (tmp_path / "order").read_text().splitlines()
    names = [line.split()[0] for line in lines[::2]]
    assert [f"{n} {w}" for n in names for w in ("begins", "ends")] == lines
    again = sum(one == other for one, other in pairwise(names))
    # On a busy machine one may not be back yet when the other looks; else it would be 22.
    assert again <= 11, names


def test_one_that_keeps_the_gpu_is_named_and_not_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process costs one wait; once it gives the GPU back there are shifts again."""
    monkeypatch.setattr(gpu_shifts, "SHIFT_S", 0.05)
    monkeypatch.setattr(gpu_shifts, "APART_S", 0.2)
    said: list[str] = []
    mine = GpuShifts("0", said.append, folder=tmp_path)
    kept = take(mine._now)
    assert "done" == mine.run(lambda: "done")
    assert [f"process {os.getpid()} has not given the GPU back for 0.05 s"] == said
    started_s = time.monotonic()
    assert "done" == mine.run(lambda: "done")
    assert time.monotonic() - started_s < 0.05
    os.close(kept)
    time.sleep(0.2)
    waited_s = mine.waited_s
    mine.run(lambda: None)
    assert mine.waited_s > waited_s  # it asked for its shift
    assert 1 == len(said)
