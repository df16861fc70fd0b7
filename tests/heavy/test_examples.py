"""Every example is executed as far as a CPU and no connection allow."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.workers.config.across import check_start, start_warning
from rlstreams.workers.config.load import load
from rlstreams.workers.config.reward import judged_by_server
from rlstreams.workers.rollout.judge import judge

EXAMPLES = Path(__file__).parents[2] / "infra" / "examples"
# Nothing to try here: overlays, and two that need a connection; one wants GPUs too.
OVERLAYS = ("slower.toml", "demo-vllm.toml", "demo-gpu.toml", "demo-sglang.toml", "one-gpu.toml")
ELSEWHERE = "reasoning_gym.toml"
ON_GPUS = "gsm8k-2gpu.toml"
OVER_IT = ("eight-gpus-hybrid.toml", "judge.toml")
AGENTS = "agent.toml"  # of agents: test_try_agents.py
TRIED = sorted(
    {path.name for path in EXAMPLES.glob("*.toml")}
    - {*OVERLAYS, ELSEWHERE, ON_GPUS, *OVER_IT, AGENTS}
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path))


@pytest.mark.parametrize("name", TRIED)
def test_an_example_answers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows, template, model and reward work together; the demo's model is right now and then."""
    assert 0 == main(["try", str(EXAMPLES / name), "--rows", "3"])
    told = capsys.readouterr().out
    assert re.search(r"^12 answers, mean reward 0\.[1-9]", told, re.MULTILINE), told
    assert "  prompt, 11 tokens: <bos>1+6+7+1+8=\n" in told
    if name == "two_parts.toml":
        assert "reward 1.2  right 1  worked 0.2" in told


def test_a_template_makes_of_messages_what_the_model_was_trained_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The chat example's prompts are those of the plain one, marks included."""
    shown = []
    for name in ("demo.toml", "chat.toml"):
        assert 0 == main(["try", str(EXAMPLES / name), "--rows", "1", "--samples", "1"])
        shown += re.findall(r"^  prompt, .*$", capsys.readouterr().out, re.MULTILINE)
    assert shown == ["  prompt, 11 tokens: <bos>1+6+7+1+8="] * 2


def test_messages_need_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without one is named, with the row and both ways out."""
    assert 78 == main(["try", str(EXAMPLES / "demo.toml"), "--data.chat=always"])
    told = capsys.readouterr().err
    assert "train.jsonl:1: " in told
    assert "has no chat template" in told
    assert "data.template" in told


def test_the_others_can_be_read() -> None:
    """An overlay changes what it is for; what needs a connection is checked without one."""
    configs = (load([EXAMPLES / "demo.toml", EXAMPLES / overlay]) for overlay in OVERLAYS)
    slower, served, *on_gpus, on_one = configs
    assert (5e-5, 60) == (slower.trainer.optimizer.lr, slower.trainer.steps)
    assert ("vllm", 60) == (served.rollout.engine, served.trainer.steps)
    for engine, config in zip(("vllm", "sglang"), on_gpus, strict=True):
        channel, device = config.weights.channel, config.logprob.device
        assert (engine, "nccl", "cuda:1") == (config.rollout.engine, channel, device)
    (device,) = on_one.devices
    assert ("vllm", "cuda:0", {"trainer", "rollout", "logprob"}) == (
        on_one.rollout.engine,
        on_one.logprob.device,
        set(device.roles),
    )
    gym = load([EXAMPLES / ELSEWHERE])
    assert ("gym:chain_sum", "reasoning-gym") == (gym.data.train, gym.reward.verifier)


def test_the_example_for_two_gpus_is_right_as_far_as_it_can_be_read() -> None:
    """A start would be accepted; the server has its GPU alone; it says that nobody ran it."""
    path = EXAMPLES / ON_GPUS
    config = load([path])
    check_start(config)
    assert "" == start_warning(config)
    assert ("cuda:0", "cuda:0", "nccl") == (
        config.trainer.device,
        config.scorer_on(["0", "1"])[0],
        config.weights.channel,
    )
    assert "1" == config.engine.env["CUDA_VISIBLE_DEVICES"]
    assert {"bfloat16"} == {config.model.dtype, config.engine.args["dtype"]}
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    assert longest <= config.engine.args["max-model-len"]
    assert "NOT RUN AS A WHOLE" in path.read_text("utf-8")


def test_roles_of_eight_gpus_have_shifts_on_all_of_them() -> None:
    """Each GPU has a rank of the trainer, one of the scorer and a server of its own."""
    config = load([EXAMPLES / ON_GPUS, EXAMPLES / "eight-gpus-hybrid.toml"])
    check_start(config)
    (device,) = config.devices
    each = [config.engine.visible(number, config.engine.servers) for number in device.gpus]
    assert list(map(str, range(8))) == each
    assert (8, 8, 1) == (config.trainer.ranks, config.logprob.ranks, config.rollout.workers)
    assert "NOT RUN" in (EXAMPLES / "eight-gpus-hybrid.toml").read_text("utf-8")


def test_a_judge_replaces_the_reward_of_another_example() -> None:
    """Its options are those that the judge takes, and nothing else changes."""
    alone, judged = load([EXAMPLES / ON_GPUS]), load([EXAMPLES / ON_GPUS, EXAMPLES / "judge.toml"])
    check_start(judged)
    taken = inspect.signature(judge).parameters
    section = judged_by_server(judged.reward, judged.judge)
    assert {"url", "model", "temperature"} <= section.options.keys() <= taken.keys()
    assert section.timeout_s < section.options["patience_s"]
    assert (alone.trainer, alone.rollout) == (judged.trainer, judged.rollout)


def test_an_example_that_counts_in_minutes_is_given_them() -> None:
    """What says `minutes a step` computes with several threads and is not taken for stalled."""
    path = EXAMPLES / ELSEWHERE
    gym = load([path])
    assert "minutes a step" in path.read_text("utf-8")
    assert gym.model.threads > 1
    assert gym.deadlines.stall_s >= 1800
