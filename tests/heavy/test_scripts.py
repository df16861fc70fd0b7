"""Scripts that measure: each starts, and those that a CPU can try do their first steps there.

They run on GPUs and now and then; a function that they call and that changes would break them
unseen. `tests.gpu.end_to_end --cpu`, which needs a broker, has the marker `slow`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from rlstreams.workers.engines.served.capacity import START
from tests.bench import fleet
from tests.factories import NOW_MS, trajectory
from tests.fake_engine import fake_weights
from tests.gpu import adaptive, joiner, lognormal_agent
from tests.gpu.result import kept
from tests.servers.served import served_engine
from tests.servers.world import World
from tests.unit.roles.stand import EXAMPLE

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests/gpu", "tests/bench")
SCRIPTS = [
    f"{folder.replace('/', '.')}.{path.stem}"
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("*.py"))
]
LIMIT_S = 240.0
SMALL = ["--vocabulary", "256", "--device", "cpu"]
SLOW = pytest.mark.slow
# What a CPU does of each, as a process: words, and what must be in the JSON that `--out` names.
TRIED = [
    pytest.param(
        "parallel_train",
        [*SMALL, "--shape", "tiny", "--folder", "{}/tiny", "--ranks", "1", "--length", "48",
         "--prompt", "8", "--sequences", "3", "--steps", "1", "--dtype", "float32",
         "--threads", "1"],
        "runs",
    ),
    pytest.param(
        "megatron_steps",
        [*SMALL, "--small", "--folder", "{}", "--gpus", "1", "--length", "48", "--prompt", "8",
         "--sequences", "3", "--steps", "1", "--dtype", "float32", "--threads", "1"],
        "dense one",
        marks=SLOW,
    ),
    pytest.param(
        "train_step",
        [*SMALL, "--shape", "tiny", "--samples", "3", "--length", "48", "--prompt", "8",
         "--bin", "128", "--steps", "1", "--cases", "padded", "--lengths", "constant"],
        "",
        marks=SLOW,
    ),
    pytest.param(
        "score_rate",
        [*SMALL, "--shape", "tiny", "--folder", "{}", "--dtype", "float32", "--budget", "256",
         "--samples", "4", "--mean", "24", "--rounds", "1"],
        "",
        marks=SLOW,
    ),
    pytest.param(
        "weight_deltas",
        [*SMALL, "--shape", "tiny", "--samples", "3", "--length", "48", "--prompt", "8",
         "--bin", "128", "--steps", "2", "--dtype", "bfloat16"],
        "times_smaller_mean",
        marks=SLOW,
    ),
    pytest.param(
        "weight_transfer",
        ["--backend", "gloo", "--model", "small", "--pullers", "1", "--repeats", "1", "--no-loss",
         "--place", "pinned"],
        "ratio",
        marks=SLOW,
    ),
    pytest.param(
        "trainer_start",
        [*SMALL, "--shape", "tiny", "--dtype", "float32", "--starts", "1"],
        "starts_s",
        marks=SLOW,
    ),
    pytest.param(
        "host_copies",
        ["--device", "cpu", "--mb", "4", "--tensor-mb", "1"],
        "pieces",
    ),
    pytest.param(
        "first_hour",
        ["--cpu", "--skip-install", "--rows", "infra/examples/demo/train.jsonl", "--steps", "3",
         "--rise", "-1", "--folder", "{}"],
        "curve",
        marks=SLOW,
    ),
]  # fmt: skip
RESULTS = ROOT / "tests/bench/results"
# What this process does of each in a moment: constants for a toy, words, and what it says.
HERE: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "tests.bench.audit": (
        {"GOALS_PER_S": {}, "GOAL_MB": float("inf")},
        ["--samples", "384", "--broker-samples", "0"],
        "samples_per_s",
    ),
    "tests.bench.codec": ({"ROUNDS": 1}, [], "wire_bytes"),
    "tests.bench.recording": ({}, ["--samples", "120"], "by_id_median_ms"),
    "tests.bench.imports": ({}, ["--module", "decimal", "--times", "1"], "kept"),
    "tests.bench.agent_turns": ({}, ["--sessions", "2", "--turns", "2"], "cpu_ms_per_call"),
}
PICTURES = {
    "reasoner_picture": "reasoner_one_h200-*.json",
}


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


@pytest.mark.parametrize(("name", "words", "key"), TRIED)
def test_a_script_measures_on_a_cpu(
    name: str, words: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A toy's figures are worthless; that there are some is not. The one by day is run in this
    process, which has torch."""
    if name == "megatron_steps":
        pytest.importorskip("megatron.core")
    out = tmp_path / "out.json"
    words = [*(word.replace("{}", str(tmp_path)) for word in words), "--out", str(out)]
    if name == "parallel_train":
        monkeypatch.setattr(sys, "argv", [name, *words])
        importlib.import_module(f"tests.gpu.{name}").main()
    else:
        run(name, words)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found[key] if key else found


@pytest.mark.parametrize("name", HERE)
def test_a_script_measures_in_this_process(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To its end, with goals that a busy machine cannot miss."""
    module, (constants, words, said) = importlib.import_module(name), HERE[name]
    for constant, value in constants.items():
        assert hasattr(module, constant), f"{name} has no {constant} any more"
        monkeypatch.setattr(module, constant, value)
    monkeypatch.setattr(sys, "argv", [name, *words])
    try:
        status = module.main()
    except SystemExit as ended:
        status = ended.code
    assert not status
    assert said in capsys.readouterr().out


def test_adapting_is_compared_on_a_stand_in(tmp_path: Path) -> None:
    """Both sides sample the same lengths, and the figures are the stand-in's own."""
    args = adaptive.parse(["--slots", "64", "--mean", "12", "--longest", "64", "--prompt", "8",
                           "--vocabulary", "16", "--warm-s", "2", "--window-s", "3"])  # fmt: skip
    args.model, world = str(EXAMPLE.parent / "demo/model"), World(tmp_path)
    server = world.serve(step_s=0.002)
    found: dict[str, Any] = {}

    def make(own: Path, **changes: Any) -> Any:
        return served_engine([server], own, **changes)

    try:
        adaptive.compare(found, server.url, make, fake_weights, tmp_path, args)
    finally:
        world.close()
    ((fixed,), (adapts,)) = found["fixed"], found["adapt"]
    assert [64, 64] == fixed["limit"]
    assert START <= adapts["warming"]["limit"][0] < adapts["limit"][1] <= 64
    assert all(row["answers"] > 0 and row["answered_tokens_per_s"] > 0 for row in (fixed, adapts))
    lengths = {body["sampling_params"]["max_tokens"] for body in server.asked}
    assert len(lengths) > 10
    assert 64 >= max(lengths)


def test_a_result_is_written_at_its_limit(tmp_path: Path) -> None:
    """What was found by then, and what ended it; no handler of errors on the way swallows it."""
    out, ended = tmp_path / "out.json", []

    def work() -> None:
        with kept(out, 0.2) as told:
            told["found"] = 1
            try:
                while True:
                    with contextlib.suppress(Exception):
                        time.sleep(5.0)
            finally:
                ended.append("cleaned up")

    with pytest.raises(SystemExit) as status:
        work()
    assert (124, ["cleaned up"]) == (status.value.code, ended)
    found = json.loads(out.read_text())
    assert found["found"] == 1
    assert "limit of 0.2 s" in found["ended"]


def test_sides_share_what_is_left_of_the_limit() -> None:
    """A slow start shortens both periods of each; else they are as asked for."""
    args = adaptive.parse(["--warm-s", "30", "--window-s", "60"])
    assert (30, 60) == (args.warm_s, args.window_s)
    args.until_s = time.monotonic() + 2 * (45 + adaptive.SIDE_S)
    own = adaptive.fitted(args, 2)
    assert [own.warm_s, own.window_s] == pytest.approx([15, 30], abs=0.2)
    assert adaptive.LEAST_S == adaptive.fitted(args, 20).window_s
    short = adaptive.fitted(adaptive.parse(["--warm-s", "2", "--window-s", "3"]), 2)
    assert (2, 3) == (short.warm_s, short.window_s), "longer than asked for"


def test_a_rate_counts_a_sample_by_its_part_of_the_period() -> None:
    """Half of it in each of two periods that meet in its middle; nothing beyond."""
    one = trajectory(started_at_ms=NOW_MS, finished_at_ms=NOW_MS + 1000)
    tokens = fleet.num_tokens(one)
    assert tokens > 0
    assert tokens == fleet.rate([one], (NOW_MS, NOW_MS + 1000))
    halves = [(NOW_MS - 500, NOW_MS + 500), (NOW_MS + 500, NOW_MS + 1500)]
    assert [tokens / 2] * 2 == [fleet.rate([one], period) for period in halves]
    assert 0.0 == fleet.rate([one], (NOW_MS + 1000, NOW_MS + 2000))


def test_a_pause_of_the_others_is_told_from_their_pace() -> None:
    """By the longest gap before; one beyond the period's end counts, one behind it does not."""
    steady = [1000.0 * n for n in range(0, 40, 2)]  # 2 s apart, the last at 38 s
    periods = {"joining": (20_000.0, 30_000.0), "leaving": (60_000.0, 70_000.0)}
    calm = joiner.pauses([*steady, *(1000.0 * n for n in range(40, 90, 3))], periods)
    assert {"before": 2.0, "joining": 2.0, "leaving": 3.0} == calm["others_longest_gap_s"]
    assert 0 == calm["others_paused"]
    late = [at for at in steady if at <= 28_000]
    held = joiner.pauses([*late, *(1000.0 * n for n in range(34, 90, 2))], periods)
    assert (6.0, 1) == (held["others_longest_gap_s"]["joining"], held["others_paused"])
    assert 0 == joiner.pauses([*steady, 55_000.0, 57_000.0], periods)["others_paused"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_of_each_recorded_result(name: str, tmp_path: Path) -> None:
    """Of the newest; what a later script writes must not leave its picture behind."""
    *_, newest = sorted(RESULTS.glob(PICTURES[name]))
    picture = tmp_path / "picture.png"
    assert 0 == importlib.import_module(f"tests.gpu.{name}").main([str(newest), str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_mutant_is_noticed_or_told(tmp_path: Path) -> None:
    """One file and its own tests: what they notice and what they do not add up to the sample."""
    rounding = ("--under", "rlstreams/workers/trainer/learn/dither.py", "--tests")
    words = (*rounding, "tests/unit/trainer/test_dither.py", "--sample", "4")
    done = subprocess.run(
        [sys.executable, "tests/bench/mutation.py", *words, "--folder", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=600.0, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stdout + done.stderr
    counts = ast.literal_eval(done.stdout.splitlines()[-1].partition(" in ")[0])
    assert 4 == sum(counts.values())
    assert 1 <= counts["killed"]


def test_answers_of_one_call_have_lognormal_lengths_and_rewards_of_their_own() -> None:
    """By session: the number within a group gave each group the same eight lengths."""
    asked: list[int] = []
    client = AsyncMock()
    client.chat.completions.create = AsyncMock(
        side_effect=lambda **words: asked.append(words["max_tokens"])
    )

    async def rewards() -> list[float]:
        own = [(f"{n // 8}/{n % 8}", n % 8) for n in range(4000)]
        tasks = [{"prompt": "p", "session": session, "sample": number} for session, number in own]
        return [await lognormal_agent.answer(t, client, mean=1000, longest=8000) for t in tasks]

    found = asyncio.run(rewards())
    assert 0.45 < sum(found) / len(found) < 0.55
    assert 900 < sum(asked) / len(asked) < 1100
    assert len(set(asked)) > 1000
    assert max(asked) <= 8000


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


def test_a_result_names_no_folder_of_the_machine_that_made_it() -> None:
    """A reader cannot go there; `--folder` and `--out` are left out of what is committed."""
    homes = re.compile(r"/(?:root|home)/\w")
    named = [path.name for path in RESULTS.glob("*.json") if homes.search(path.read_text("utf-8"))]
    assert [] == named
