"""The doctor asks of model servers what a rollout worker would ask of them."""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.check.doctor import engines
from rlstreams.check.doctor.check import EVERYTHING, Check, Host, Level
from rlstreams.check.doctor.diagnose import preflight
from rlstreams.check.doctor.engines import engine_checks
from rlstreams.streams.broker.ports import free_port
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.served.facts import Kind, to_install
from tests.servers.fake_server import FakeServer
from tests.servers.world import World

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "infra/examples/demo.toml"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(engines, "ASK_S", 2.0)
    made = World(tmp_path)
    yield made
    made.close()


def python_with(folder: Path, version: str) -> Path:
    """An executable that answers as a Python with this vLLM would."""
    program = folder / "python"
    program.write_text(f"""#!/bin/sh\necho '["vllm", "{version}", ""]'\n""")
    program.chmod(0o755)
    return program


def config_of(folder: Path, *words: str) -> RunConfig:
    return load([DEMO], [f"--run.dir={folder / 'run'}", "--rollout.engine=vllm", *words])


def found(config: RunConfig, host: Host = EVERYTHING, *, has_model: bool = True) -> list[Check]:
    return list(engine_checks(config, host, has_model=has_model))


def named(config: RunConfig, name: str, host: Host = EVERYTHING) -> Check:
    (check,) = [check for check in found(config, host) if check.name == name]
    return check


def urls(*servers: FakeServer | str) -> str:
    listed = [server if isinstance(server, str) else server.url for server in servers]
    return f"--engine.urls={listed}".replace("'", '"')


def test_the_built_in_engine_has_no_server() -> None:
    assert [] == found(load([DEMO]))


@pytest.mark.parametrize(
    ("python", "told"),
    [
        ("no/such/python", "no/such/python cannot be asked what it has: No such file or directory"),
        ("/bin/false", "/bin/false cannot be asked what it has: it ended with status 1; name the"),
        ("/bin/echo", "/bin/echo cannot be asked what it has: it does not answer as a Python does"),
        ("", " -m pip install vllm==0.25.1), or name the Python that has it, or give engine.urls"),
    ],
)
def test_a_python_that_cannot_start_the_server(tmp_path: Path, python: str, told: str) -> None:
    """Without the question, which is a program; `up` refuses it before it starts a broker."""
    config = config_of(tmp_path, f"--engine.python={python}")
    check = named(config, "engine")
    assert check.level is Level.FAIL
    assert check.found.startswith("engine.python: ")
    assert told in check.found
    with pytest.raises(ConfigError, match=r"engine\.python: "):
        preflight(config)


def test_a_version_that_was_never_tried(tmp_path: Path) -> None:
    """One older than all that were run is refused with the version to install, before it is
    started; any other is tried: what is looked at is said, at a start as well."""

    def check(version: str, *words: str) -> Check:
        python = python_with(tmp_path, version)
        return named(config_of(tmp_path, f"--engine.python={python}", *words), "engine")

    old = check("0.24.9")
    assert old.level is Level.FAIL
    assert "older than 0.25.1, the oldest that rlstreams was run with: install vllm==0.25.1" in (
        old.found
    )
    allowed = check("0.24.9", "--engine.allow_untested=true")
    newer = check("0.99.0")
    assert (Level.WARN, Level.WARN, Level.OK) == (
        allowed.level,
        newer.level,
        check("0.32.0+cu129").level,
    )
    assert "was not run with rlstreams (0.25.1, 0.32.0 were), and is tried; what a start" in (
        newer.found
    )
    told: list[str] = []
    python = python_with(tmp_path, "0.99.0")
    preflight(config_of(tmp_path, f"--engine.python={python}", "--rollout.capture_experts=false"),
              told.append)  # fmt: skip
    assert [f"warning: {newer.found}"] == [line for line in told if "vllm 0.99.0" in line]


def test_the_extra_brings_the_version_that_errors_say_to_install() -> None:
    """`pip install 'rlstreams[vllm]'`, into the Python that runs rlstreams."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = project["optional-dependencies"]["vllm"]
    assert wanted.partition(";")[0].strip() == to_install(Kind.VLLM)


def test_an_argument_that_contradicts_one_of_ours(tmp_path: Path) -> None:
    """It is part of the start command; without the model's folder that is not made."""
    python = python_with(tmp_path, "0.32.0")
    config = config_of(tmp_path, f"--engine.python={python}", "--engine.args.logprobs-mode=raw")
    assert "engine.args.logprobs-mode is 'raw'" in named(config, "engine").found
    (check,) = [c for c in found(config, has_model=False) if c.name == "engine"]
    assert check.level is Level.OK


def test_ports_of_servers(tmp_path: Path) -> None:
    """Taken, too high, the broker's own; one taken by the run's own server is fine."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        config = config_of(tmp_path, f"--engine.port={number}")
        check = named(config, "engine.port")
        assert (Level.FAIL, f"another process listens on {number}") == (check.level, check.found)
        pid = tmp_path / "run/logs/vllm-0.pid"
        pid.parent.mkdir(parents=True)
        pid.write_text(f"{os.getpid()}\n")
        assert (Level.OK, "the run's own servers are up") == (
            (check := named(config, "engine.port")).level,
            check.found,
        )
        pid.write_text("999999999\n")  # of a run that was killed
        assert named(config, "engine.port").level is Level.FAIL
    free = config_of(tmp_path, f"--engine.port={free_port()}")
    assert named(free, "engine.port").level is Level.OK
    same = config_of(tmp_path, f"--engine.port={number}", f"--broker.port={number}")
    assert named(same, "engine.port").found == f"{number} is broker.port too"
    high = config_of(tmp_path, "--engine.port=65535", "--rollout.workers=2")
    assert "server 1 of the run would have port 65536" in named(high, "engine.port").found
    assert named(high, "engine.port", Host(role="rollout", ordinal=0)).level is Level.OK


def test_a_server_that_runs_is_asked_what_it_is(world: World) -> None:
    server = world.serve()
    config = config_of(world.folder, urls(server))
    check = named(config, "engine.urls")
    assert (Level.OK, True) == (check.level, f"{server.url}: vllm/0.32.0, model" in check.found)
    other = config_of(world.folder, urls(server), "--rollout.engine=sglang")
    check = named(other, "engine.urls")
    assert (Level.FAIL, True) == (
        check.level,
        f"server {server.url} is vllm/0.32.0, but rollout.engine is sglang" in check.found,
    )


def test_a_server_that_does_not_answer_is_named_with_the_error(world: World) -> None:
    """A failure for a worker that has no other, a warning for one that has."""
    server, gone = world.serve(), f"http://127.0.0.1:{free_port()}"
    check = named(config_of(world.folder, urls(gone)), "engine.urls")
    assert check.level is Level.FAIL
    assert check.found.startswith(f"server {gone}: GET /workers: connection failed: ")
    assert "rlstreams config server vllm CONFIG" in check.advice
    levels = [c.level for c in found(config_of(world.folder, urls(gone, server)))]
    assert [Level.WARN, Level.OK] == levels
    two = config_of(world.folder, urls(gone, server), "--rollout.workers=2")
    assert [Level.FAIL, Level.OK] == [c.level for c in found(two)]
    assert named(two, "engine.urls", Host(role="rollout", ordinal=1)).level is Level.OK


def test_a_server_that_hangs_costs_the_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are asked at once."""
    monkeypatch.setattr(engines, "ASK_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        check = named(config_of(world.folder, urls(url)), "engine.urls")
    assert f"server {url}: GET /workers: no answer within 0.2 s" == check.found
