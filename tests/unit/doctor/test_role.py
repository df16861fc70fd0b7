"""`doctor --role ROLE`: what one role needs on a host of its own, and nothing of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.check.doctor.check import Check, Host, Level, probed
from rlstreams.check.doctor.diagnose import secrets_check, weights_check
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "infra/examples/demo.toml"
NO_BROKER = "--broker.bootstrap=127.0.0.1:1"
EVERYWHERE = {"disk", "files", "gpus", "secrets", "model", "broker"}


@pytest.fixture(autouse=True)
def _no_compiler_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch names its folder itself, in a process that has compiled a kernel."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


def answered(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Check]:
    main(["doctor", str(DEMO), "--json", f"--run.dir={folder / 'run'}", NO_BROKER, *words])
    return {row["name"]: Check(**row) for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("prompts", {"memory", "data.train", "data.held_out"}),
        ("rollout", {"weights", "numerics", "answers", "memory", "verifier"}),
        ("logprob", {"weights", "numerics", "answers", "memory"}),
        ("trainer", {"weights", "numerics", "answers", "memory"}),
    ],
)
def test_only_what_a_role_needs_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str, names: set[str]
) -> None:
    """No Java on a worker's host, data only where it is read, a verifier only where it judges."""
    checks = answered(capsys, tmp_path, "--role", role)
    assert EVERYWHERE | names == set(checks)
    assert ["broker"] == [name for name, check in checks.items() if check.level == "fail"]


def test_a_role_is_not_asked_for_files_that_its_host_need_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data of `prompts` is not on the rollout host, nor user code on that of the scorer."""
    absent = f"--data.train={tmp_path / 'no.jsonl'}"
    assert "data.train" not in answered(capsys, tmp_path, "--role=rollout", absent)
    assert "fail" == answered(capsys, tmp_path, "--role=prompts", absent)["data"].level
    broken = "--reward.verifier=no_such_file.py:reward"
    assert "fail" == answered(capsys, tmp_path, "--role=rollout", broken)["verifier"].level
    assert "verifier" not in answered(capsys, tmp_path, "--role=logprob", broken)


def test_a_worker_by_itself_needs_a_broker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded one is on this host or nowhere."""
    words = ["doctor", str(DEMO), f"--run.dir={tmp_path / 'run'}", "--role=logprob"]
    assert 1 == main(words)
    out = capsys.readouterr().out
    assert "no embedded broker runs in" in out


def asked(*words: str, role: str) -> Check:
    (found,) = probed("weights", lambda: weights_check(load([DEMO], words), Host(role=role)))
    return found


def test_how_weights_reach_other_hosts() -> None:
    """By files on a common folder; else a secret, and an address that others reach."""
    assert "must all mount there" in asked(role="trainer").found
    gloo = "--weights.channel=gloo"
    loopback = asked(gloo, role="rollout")
    assert (Level.WARN, True) == (loopback.level, "only the trainer's own host" in loopback.found)
    named = [gloo, "--weights.host=192.0.2.1"]
    assert "weights.secret is empty" in asked(*named, role="logprob").found
    named.append("--weights.secret=env:A_SECRET")
    assert asked(*named, role="logprob").level is Level.OK
    trainer = asked(*named, role="trainer")
    assert (Level.FAIL, True) == (trainer.level, "no address of this host" in trainer.found)


def test_a_number_without_a_role_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It would be a worker of which role?"""
    assert 78 == main(["doctor", str(DEMO), "--ordinal=1"])
    assert "name it with --role" in capsys.readouterr().err


def of_secrets(config: RunConfig, role: str = "") -> Check:
    return secrets_check(config, Host(role=role))


def test_secrets_that_are_not_set_are_told_where_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By field and name, never by value."""
    monkeypatch.delenv("A_TOKEN", raising=False)
    config = load([DEMO], ["--engine.env.HF_TOKEN=env:A_TOKEN", "--weights.secret=env:A_SECRET"])
    monkeypatch.setenv("A_SECRET", "swordfish")
    check = of_secrets(config)
    assert check.level is Level.FAIL
    assert "environment variable A_TOKEN is not set (wanted by engine.env.HF_TOKEN" in check.found
    assert of_secrets(config, "server").level is Level.FAIL
    assert of_secrets(config, "trainer").found == "there: weights.secret"
    assert of_secrets(config, "prompts").found == "none is referred to"
