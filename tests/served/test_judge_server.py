"""The run's own judge: the role that starts its server, and the verifier that asks it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlstreams.streams.broker.ports import free_ports
from rlstreams.streams.log.errors import ConfigError
from rlstreams.up.supervisor.fleet import num_workers
from rlstreams.workers.bootstrap.addresses import own_urls
from rlstreams.workers.bootstrap.judge_server import is_judge
from rlstreams.workers.bootstrap.model_server import make_server_role
from rlstreams.workers.config.load import check_secrets, load, load_with_origins
from rlstreams.workers.config.reward import judged_by_server
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.agreement import check_ordinal, judged_by
from rlstreams.workers.loop.context import Context
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox.reward import AnswerToJudge
from rlstreams.workers.server import worker as module
from rlstreams.workers.server.worker import ServerEndedError, ServerWorker
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.servers.judge_python import write_python
from tests.unit.roles.stand import Stand
from tests.unit.workers.test_config_load import write

LIMIT_S = 60.0
JUDGED = "[reward]\nverifier = 'judge'\n[judge]\nmodel = 'hf:org/judge'\n"


@pytest.fixture
def role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerWorker]:
    """Of a run that samples in its workers: the judge is its only server."""
    monkeypatch.setattr(module, "POLL_S", 0.01)
    python, model = tmp_path / "python", tmp_path / "judge-model"
    model.mkdir()
    write_python(python)
    (port,) = free_ports(1)
    stand = Stand(
        tmp_path, reward__verifier="judge", judge__model=str(model), judge__python=str(python),
        judge__port=port, **{"judge__args__max-model-len": 64},
    )  # fmt: skip
    made = make_server_role(stand.context("server", 0))
    yield made
    made._process.end()
    made._looks.close()


def of(config: RunConfig, ordinal: int, **changes: Any) -> Context:
    bus = MemoryBus(made_log("demo"), "demo")
    return Context(
        config=config, bus=bus, role="server", ordinal=ordinal, instance="one", **changes
    )


def until_ready(role: ServerWorker) -> int:
    until_s = time.monotonic() + LIMIT_S
    while role._ready_s is None:
        assert time.monotonic() < until_s, role._process.log.read_text()
        role.tick()
    assert role._process.child is not None
    return role._process.child.pid


def test_its_server_is_started_and_judges(role: ServerWorker) -> None:
    """Asked by the name and the address that the section has; when it dies its role ends."""
    pid = until_ready(role)
    config = role._reporter._context.config
    with make_verifier(judged_by_server(config.reward, config.judge)) as verifier:
        judged = verifier.judge(AnswerToJudge("a question", "the answer", "the answer", {}))
    assert (judged.reward, judged.note) == (0.75, "It is so.\n0.75")
    os.kill(pid, signal.SIGKILL)
    ended = role._process.child
    assert ended is not None
    assert ended.wait(LIMIT_S)
    with pytest.raises(ServerEndedError, match="was ended by SIGKILL"):
        role.tick()


@pytest.mark.parametrize(
    ("engine", "place"),
    [
        ("", 0),
        ("[rollout]\nengine = 'vllm'\nworkers = 2\n[engine]\nservers = 2\n", 4),
        ("[rollout]\nengine = 'vllm'\n[engine]\nurls = ['http://a:1']\n", 0),
    ],
)
def test_it_is_one_more_server_of_the_run(tmp_path: Path, engine: str, place: int) -> None:
    """Behind those that are sampled from, whose addresses it is none of."""
    config = load([write(tmp_path, engine + JUDGED)])
    assert [is_judge(of(config, number)) for number in range(6)] == [
        number == place for number in range(6)
    ]
    assert not is_judge(of(config, place, is_joined=True))
    assert num_workers(config)["server"] == place + 1
    assert len(own_urls(config)) == place
    check_ordinal(config, "server", place)
    plain = load([write(tmp_path, engine)])
    assert not any(is_judge(of(plain, number)) for number in range(6))
    assert num_workers(plain)["server"] == place


def test_a_verifier_with_a_judge_elsewhere_keeps_it(tmp_path: Path) -> None:
    """Of a sum each part by itself; and another model is another grader."""
    parts = (
        "[reward]\nverifier = 'sum'\n[judge]\nmodel = 'hf:org/judge'\nport = 9100\n"
        "[[reward.parts]]\nverifier = 'judge'\nname = 'a'\n"
        "[[reward.parts]]\nverifier = 'judge'\nname = 'b'\n"
        "options = { url = 'http://b:1', model = 'other' }\n"
    )
    config = load([write(tmp_path, parts)])
    own, other = judged_by_server(config.reward, config.judge).parts
    assert own.options == {
        "url": "http://127.0.0.1:9100",
        "model": "hf:org/judge",
        "patience_s": 600,
    }
    assert other == config.reward.parts[1]
    again = load([write(tmp_path, parts.replace("org/judge", "org/larger"))])
    assert judged_by(config, {}) != judged_by(again, {})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[judge]\nmodel = 'hf:org/judge'\n",
            "judge.model is set, but reward.verifier is 'exact': no",
        ),
        (f"{JUDGED}port = 0\n", "judge.port must be above 0"),
        ("[judge]\nport = 9000\n", "judge.model is empty"),
        (f"{JUDGED}env = {{ HF_TOKEN = 'plain' }}\n", "judge.env.HF_TOKEN is a secret"),
    ],
)
def test_what_cannot_be_meant_is_told(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_secrets(load_with_origins([write(tmp_path, text)]))


def test_an_argument_that_contradicts_ours_is_named(role: ServerWorker) -> None:
    config = role._reporter._context.config
    config = replace(config, judge=replace(config.judge, args={"port": 1}))
    with pytest.raises(ConfigError, match=r"judge\.args\.port is 1, but rlstreams needs"):
        make_server_role(of(config, 0))
