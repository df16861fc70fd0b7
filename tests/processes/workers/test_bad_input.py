"""`rlstreams up` with something broken: one clear line, and nothing was started.

What a bad value does to the configuration is in `unit/workers/test_config_load.py`, bad rows in
`unit/problems/test_problems.py`, failing verifiers in `sandbox/test_contract.py`, bad records in
`unit/workers/test_stage.py`, and what needs a broker in `tests/integration`.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from rlstreams.__main__ import main

DEMO = Path(__file__).parents[3] / "infra/examples/demo.toml"
LONG = json.dumps({"prompt": "1+" * 100 + "1=", "answer": "101"})
CHAT = json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"})
VERIFIER = """
import os, time
def raises(*row): return 1 / 0
def hangs(*row): time.sleep(3600)
def text(*row): return "good"
def dies(*row): os._exit(3)
"""


def up(folder: Path, *words: str) -> int:
    return main(["up", str(DEMO), f"--run.dir={folder / 'run'}", "--no-live", *words])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data.train=none.jsonl"], "data.train: there is no file '{0}/none.jsonl'"),
        (["--data.held_out=none.jsonl"], "data.held_out: there is no file '{0}/none.jsonl'"),
        (["--data.train=row.jsonl"], "data.train: {0}/row.jsonl:2: no `prompt` (fields: promt)"),
        (["--data.train=long.jsonl"], "{0}/long.jsonl:1: prompt of 203 tokens; the"),
        (["--data.train=chat.jsonl"], "{0}/chat.jsonl:1: "),
        (["--model.path=none"], "model.path: there is no folder '{0}/none'"),
        (["--model.path=."], "model.path: '{0}' is no model folder: no config.json"),
        (["--reward.verifier=none.py:f"], "reward.verifier: there is no file"),
        (["--reward.verifier=v.py:g"], "v.py has no function 'g' (it has: raises, hangs, text, d"),
        (["--reward.verifier=v.py:raises"], "v.py:3: raises raised ZeroDivisionError"),
        (["--reward.verifier=v.py:hangs", "--reward.timeout_s=0.5"], "no answer within 0.5 s"),
        (["--reward.verifier=v.py:text"], "v.py:5 returned 'good' of type str"),
        (["--reward.verifier=v.py:dies"], "v.py:6: dies died with status 3"),
        (["--broker.bootstrap=127.0.0.1:1"], "no broker answers at 127.0.0.1:1: "),
        (["--broker.bootstrap=nonsense:1"], "no broker answers at nonsense:1: "),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    """One line with field, file and value, and the status of its kind; no folder is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "row.jsonl").write_text('{"prompt": "1+1="}\n{"promt": "1+1="}\n')
    (tmp_path / "long.jsonl").write_text(LONG)
    (tmp_path / "chat.jsonl").write_text(CHAT)
    (tmp_path / "v.py").write_text(VERIFIER)
    assert (1 if "bootstrap" in words[0] else 78) == up(tmp_path, *words)
    (line,) = capsys.readouterr().err.splitlines()
    assert told.format(tmp_path) in line
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any Java is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert 1 == up(tmp_path, f"--broker.port={port}")
        assert 78 == up(tmp_path, "--web", str(port))
    said = capsys.readouterr().err
    assert f"broker.port {port} is in use" in said
    assert f"--web {port} cannot be had" in said
    assert not (tmp_path / "run").exists()
