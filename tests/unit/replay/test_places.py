"""Folders that are named and are not there, or are something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.places import (
    CHECKPOINTS,
    RECORDINGS,
    RUNS,
    VERSIONS,
    check_folder_of,
    check_place,
)
from rlstreams.streams.run.recorded_log import is_recording


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two runs and a recording."""
    for name in ("runs/demo", "runs/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text('{"run": {}}')
    (tmp_path / "recordings/demo").mkdir(parents=True)
    (tmp_path / "recordings/demo/manifest.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(name: str, *kinds: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_place(name, kinds or (RUNS, RECORDINGS))
    return str(caught.value)


def test_what_is_there_passes() -> None:
    """A run, a recording, and files, whose loader has its own say."""
    for name in ("runs/demo", "recordings/demo", "some.toml"):
        check_place(name)
    check_place("recordings/demo", [RECORDINGS])


def test_a_folder_that_is_not_there_is_answered_with_those_that_are() -> None:
    assert (
        "runs/demi is not there; did you mean runs/demo? "
        "there are runs: runs/demo, runs/other; recordings: recordings/demo"
    ) == refusal("runs/demi")
    assert "nope is not there; there are recordings: recordings/demo" == refusal("nope", RECORDINGS)
    assert "elsewhere/x is not there; there are runs: runs/demo, runs/other" == refusal(
        "elsewhere/x", RUNS
    )


def test_a_folder_of_another_kind_says_which(here: Path) -> None:
    """With the way from a run to a recording."""
    assert (
        "runs/demo is a run, not a recording (make one: rlstreams record run runs/demo); "
        "there are recordings: recordings/demo"
    ) == refusal("runs/demo", RECORDINGS)
    (here / "empty").mkdir()
    assert "empty is neither a run nor a recording: it has no config.json" in refusal("empty")


def test_a_models_folder_is_no_run(here: Path) -> None:
    """It has a file of the same name; it is neither taken nor offered."""
    (here / "runs/model").mkdir()
    (here / "runs/model/config.json").write_text('{"model_type": "qwen3"}')
    assert (
        "runs/model is not a run: it has no config.json of a run; "
        "there are runs: runs/demo, runs/other"
    ) == refusal("runs/model", RUNS)
    assert refusal("runs/demi", RUNS).endswith("there are runs: runs/demo, runs/other")


def test_an_empty_place_says_where_they_would_be(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "bare").mkdir()
    monkeypatch.chdir(here / "bare")
    assert "x is not there; there is no run in runs/ and no recording in recordings/ here" == (
        refusal("x")
    )


def test_a_recording_without_its_manifest_is_called_one(here: Path) -> None:
    """Its files betray it."""
    (here / "recordings/demo/manifest.json").rename(here / "gone.json")
    (here / "recordings/demo/000000.parquet").write_bytes(b"")
    assert "recordings/demo is a recording without its manifest.json" in refusal("recordings/demo")


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "3/4", "runs/demi"],
        ["record", "diff", "runs/demi", "runs/other"],
        ["replay", "step", "3", "runs/demi"],
        ["record", "run", "runs/demi"],
        ["export", "samples", "runs/demi", "--out", "x.jsonl"],
        ["replay", "trainer", "recordings/demi"],
        ["record", "verify", "recordings/demi"],
    ],
)
def test_every_command_that_takes_a_folder_says_so(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 78, one line, no traceback."""
    assert 78 == main(words)
    said = capsys.readouterr().err.strip()
    assert said.startswith("ConfigError: ")
    assert "demi is not there; did you mean " in said
    assert 1 == len(said.splitlines())


@pytest.fixture
def checkpoints(here: Path) -> str:
    """One checkpoint in the folder of a run, and a weight version."""
    folder = here / "runs/demo/checkpoints/000001-00000012"
    folder.mkdir(parents=True)
    said = {"run": "demo", "epoch": 1, "step": 12, "policy_version": 12, "weight_hash": "a1"}
    (folder / "manifest.json").write_text(json.dumps(said), encoding="utf-8")
    (here / "runs/demo/weights").mkdir()
    (here / "runs/demo/weights/v3-a1.safetensors").write_bytes(b"")
    return "runs/demo/checkpoints"


def test_checkpoints_are_neither_runs_nor_recordings(checkpoints: str) -> None:
    """Although each has a file of a recording's name; what was expected is said."""
    one = f"{checkpoints}/000001-00000012"
    assert refusal(one, RECORDINGS).startswith(f"{one} is one checkpoint, not a recording; ")
    assert refusal(checkpoints, RECORDINGS).startswith(
        f"{checkpoints} is a folder of checkpoints, not a recording; "
    )
    assert refusal("runs/demo/weights", RUNS).startswith(
        "runs/demo/weights is a folder of weight versions, not a run; "
    )
    assert refusal(one).startswith(f"{one} is one checkpoint, neither a run nor a recording; ")
    assert not is_recording(one)


def test_commands_are_not_misled_by_checkpoints(
    checkpoints: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever they read; nor are they listed as recordings that are damaged."""
    one = f"{checkpoints}/000001-00000012"
    for words in (
        ["replay", "run", one],
        ["inspect", "3/4", one],
        ["record", "diff", one, one],
        ["replay", "step", "3", one],
        ["report", one],
        ["record", "run", checkpoints],
        ["export", "samples", checkpoints, "--out", "x.jsonl"],
    ):
        assert 78 == main(words), words
        assert "checkpoint" in capsys.readouterr().err.split(";")[0], words
    assert 1 == main(["record", "list", checkpoints])
    assert f"no recording in {checkpoints}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("runs/demo", "runs/demo is a run"),
        ("recordings/demo", "recordings/demo is a recording"),
        ("runs/demo/weights", "runs/demo/weights is a folder of weight versions"),
        ("runs/other", "runs/other is a run"),
        ("runs/gone", "runs/gone is not there"),
        ("runs/demo/config.json", "runs/demo/config.json is something else"),
        ("runs", "runs is something else"),
        ("runs/demo/checkpoints/000001-00000012", "is one checkpoint"),
    ],
)
def test_what_is_no_folder_of_checkpoints_is_named(
    checkpoints: str, name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was passed by without a word, and no checkpoint was found."""
    check_folder_of(CHECKPOINTS, checkpoints, "--checkpoints")
    assert 78 == main(["replay", "step", "3", "recordings/demo", "--checkpoints", name])
    said = capsys.readouterr().err
    assert "--checkpoints takes a folder of checkpoints; " in said
    assert told in said


def test_weights_of_a_replay_are_versions(
    checkpoints: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's folder has them, and is none."""
    check_folder_of(VERSIONS, "runs/demo/weights", "--weights")
    for name, told in (
        (checkpoints, CHECKPOINTS),
        ("runs/demo", "a run; it has runs/demo/weights"),
    ):
        words = ["replay", "logprob", "recordings/demo", "--weights", name]
        assert 78 == main(words)
        said = capsys.readouterr().err
        assert f"--weights takes a folder of weight versions; {name} is {told}" in said
