"""Tables `[[agent]]`: what they mean, and what does not go with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.across import check_start
from rlstreams.workers.config.load import check_secrets, load, load_with_origins
from rlstreams.workers.loop.agreement import user_code_hashes
from rlstreams.workers.loop.stall import limits_of
from tests.unit.workers.test_config_load import write

EXAMPLES = Path(__file__).parents[3] / "infra/examples"
REMOTE = "[[agent]]\nremote = true\n"
OUTSIDE = "[[agent]]\noutside = true\n"
AGENT = "[[agent]]\ncommand = ['python', 'solver.py']\n"


def test_the_example_names_a_file_beside_it() -> None:
    config = load([EXAMPLES / "agent.toml"])
    (agent,) = config.agent
    assert agent.python == f"{EXAMPLES / 'agent/solver.py'}:solve"
    assert config.num_turns == agent.max_calls == 3
    assert any("solver.py" in name for name in user_code_hashes(config))


def test_files_of_a_command_are_those_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "solver.py").touch()
    run = write(tmp_path, "[[agent]]\ncommand = ['python', 'solver.py', 'other.py', '-v']\n")
    (agent,) = load([run]).agent
    assert agent.command == ("python", str(tmp_path / "solver.py"), "other.py", "-v")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[agent]]\nname = 'a'\n", "agent 'a': set one of `command`.*; none is set"),
        (f"{AGENT}python = 'a.py:f'\n", "; `command` and `python` are set"),
        (f"{AGENT}remote = true\n", "; `command` and `remote` are set"),
        (f"{AGENT}[gateway]\nport = 1\n", "gateway is set, but no table .*remote = true"),
        ("[gateway]\nport = 1\n", "gateway is set, but there is no table"),
        (
            f"{REMOTE}lease_s = 600.0\n",
            "lease_s is 600 of agent 'agent', but its timeout_s is 240: .* earn 0",
        ),
        (f"{AGENT}outside = true\n", "; `command` and `outside` are set"),
        (
            f"{OUTSIDE}[reward]\nverifier = 'exact'\n",
            "reward.verifier is 'exact', and agent 'agent' is outside: it would compare",
        ),
        (
            f"{OUTSIDE}[reward]\nverifier = 'agent'\n[data]\nheld_out_rows = 4\n",
            "held-out rows, and agent 'agent' is outside",
        ),
        (f"{REMOTE}[gateway]\nhost = '0.0.0.0'\n", "gateway.host is '0.0.0.0': runners are given"),
        (f"{REMOTE}[gateway]\nurl = 'host:1'\n", "gateway.url must be like https://host:{port}"),
        (f"{REMOTE}[gateway]\nurl = 'http://a:{{prt}}'\n", "gateway.url may have no braces but"),
        (f"{REMOTE}[gateway]\nport = 65535\n[rollout]\nworkers = 2\n", "gateway.port is 65535"),
        ("[[agent]]\npython = 'a.py'\n", r"agent\.python must be `file\.py:function`"),
        (f"{AGENT}name = 'a b'\n", "agent.name must be 1 to 64 letters"),
        (f"{AGENT}options = {{ x = 1 }}\n", "agent.options is set, but agent 'agent' has no"),
        ("[[agent]]\npython = 'a.py:f'\nenv = { A = 'b' }\n", "agent.env is set, but agent"),
        (f"{AGENT}ignore = ['[']\n", r"agent\.ignore: '\[' of agent 'agent' is no expression"),
        (f"{AGENT}ignore = ['x*']\n", r"agent\.ignore: 'x\*' .* finds nothing, too"),
        (f"{AGENT}auxiliary_models = ['(']\n", r"agent\.auxiliary_models: '\(' .* no expression"),
        (f"{AGENT}auxiliary_prompts = ['']\n", r"agent\.auxiliary_prompts: '' .* finds nothing"),
        (f"{AGENT}max_calls = 0\n", "agent.max_calls must be above 0, got 0"),
        (f"{AGENT}max_turns = 3\n", r"unknown field agent\[0\]\.max_turns; known: name,"),
        (f"{AGENT}{AGENT}", "agent.name is 'agent' twice"),
        (f"{AGENT}[environment]\nname = 'a.py:B'\n", "there are tables .*agent.*keep one of them"),
        (f"{AGENT}[data]\nchat = 'always'\n", "data.chat is 'always', and there are tables"),
        (f"{AGENT}[data]\nsystem_prompt = 'Be'\n", "data.system_prompt is 'Be', and there are"),
        (f"{AGENT}timeout_s = 600.0\n", "agent.timeout_s is 600 of agent 'agent', but rollout"),
        ("[reward]\nverifier = 'agent'\n", "reward.verifier is 'agent', but there is no table"),
        (f"{AGENT}[reward]\nverifier = 'environment'\n", "environment.name is empty"),
        (f"{AGENT}env = {{ MY_API_KEY = 'plain' }}\n", r"agent\[0\]\.env\.MY_API_KEY is a secret"),
    ],
)
def test_what_cannot_be_meant_is_told(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load([write(tmp_path, text)])


def test_secrets_of_an_agent_are_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path, f"{AGENT}env = {{ MY_API_KEY = 'env:AGENTS_KEY' }}\n")
    with pytest.raises(ConfigError, match=r"agent\[0\]\.env\.MY_API_KEY.*AGENTS_KEY"):
        check_secrets(load_with_origins([run]))
    monkeypatch.setenv("AGENTS_KEY", "x")
    check_secrets(load_with_origins([run]))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[outcome]\nwait_for = ['human']\n", "outcome.wait_for.*outcomes are of sessions"),
        (f"{AGENT}[outcome]\nwait_for = ['a', 'a']\n", "outcome.wait_for names 'a' twice"),
        (f"{AGENT}[outcome]\nwait_for = ['']\n", "outcome.wait_for has an empty name"),
        (f"{AGENT}[outcome]\nwait_for = ['a']\ndeadline_s = 0\n", "outcome.deadline_s"),
    ],
)
def test_outcomes_that_nobody_can_wait_for(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load([write(tmp_path, text)])


def test_a_group_outlives_the_wait_for_its_graders(tmp_path: Path) -> None:
    """Its clock starts with its first scored sample; and a worker that only waits is not stuck."""
    config = load([write(tmp_path, f"{AGENT}[outcome]\nwait_for = ['human']\n")])
    check_start(config)
    slow = replace(config, outcome=replace(config.outcome, deadline_s=5000.0))
    with pytest.raises(ConfigError, match=r"trainer\.group_deadline_s.*outcome\.deadline_s"):
        check_start(slow)
    assert limits_of(slow).sample_s == limits_of(config).sample_s + 4400.0
