"""Configurations of devices that roles share: what cannot be is named, with what to set."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.load import load
from rlstreams.workers.logprob.passing import PassingScorer
from rlstreams.workers.loop.agreement import check_alone

EXAMPLES = Path(__file__).parents[3] / "infra/examples"
CARD = '[[devices]]\nname = "card"\nroles = ["trainer", "logprob"]\n'
ON_CARD = ["--trainer.device=cuda:0", "--logprob.device=cuda:0"]


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (CARD.replace('"logprob"', '"trainer"'), [], r"devices.roles of 'card' is \['trainer', "),
        (CARD.replace('"trainer", ', ""), [], "name at least two roles, each once"),
        (CARD.replace("logprob", "prompts"), [], "devices must be an array of tables"),
        (CARD.replace("card", ""), [], "devices.name is empty"),
        (CARD + CARD, [], "devices.name names 'card' twice"),
        (CARD + CARD.replace("card", "b"), [], "devices.roles names 'logprob' twice, in 'card'"),
        (CARD + "gpus = [0, 0]", [], r"devices.gpus of 'card' is \[0, 0\]: name each GPU once"),
        (CARD + "gpus = [0]", [], "trainer.device is 'cpu', but .* device 'card', .* to 'cuda:0'"),
        (CARD, ON_CARD, r"'cuda:0', but .* device 'card', .* has gpus \[\]: .* 'cpu'"),
        (CARD, ["--logprob.workers=2"], "logprob.workers is 2, but the role shares device 'card'"),
        (
            CARD,
            ["--weights.channel=gloo", "--weights.snapshot=device"],
            "set 'pinned' or 'auto'",
        ),
        (
            CARD + "gpus = [0]",
            [*ON_CARD, "--trainer.ranks=2"],
            r"trainer.ranks is 2 from 'cuda:0' on, .* gpus \[0\]: add \[1\] to devices.gpus",
        ),
        (
            CARD,
            ["--logprob.place=trainer", "--trainer.loss.proximal=step_start"],
            "logprob.place is 'trainer', but the role shares device 'card': .* leave it out of",
        ),
        (CARD, ["--run.id=card"], "devices.name is 'card', as run.id is"),
        (
            CARD.replace("logprob", "rollout"),
            ["--rollout.engine=vllm", '--engine.urls=["http://a:1"]'],
            "engine.urls names 1 servers, but the role shares device 'card'",
        ),
        (
            CARD + "turn_s = 200",
            [],
            "devices.turn_s is 200, but devices.longest_turn_s is 120, of device 'card'",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, text: str, words: list[str], message: str
) -> None:
    (tmp_path / "devices.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load([EXAMPLES / "demo.toml", tmp_path / "devices.toml"], words)


def test_roles_of_several_ranks_have_shifts_on_all_their_gpus(tmp_path: Path) -> None:
    """Of a scorer on fewer of them too."""
    (tmp_path / "devices.toml").write_text(CARD + "gpus = [0, 1]")
    words = [*ON_CARD, "--trainer.ranks=2", "--logprob.ranks=2"]
    for given in (words, words[:-1]):
        config = load([EXAMPLES / "demo.toml", tmp_path / "devices.toml"], given)
        assert config.shared_device("trainer") is config.devices[0]


def test_a_worker_that_holds_a_reference_alone_has_shifts(tmp_path: Path) -> None:
    """Its scorer of policies has nothing to give up."""
    (tmp_path / "devices.toml").write_text(CARD)
    words = ["--logprob.place=trainer", "--trainer.loss.proximal=step_start"]
    words += ["--trainer.loss.kl_coef=0.1"]
    config = load([EXAMPLES / "demo.toml", tmp_path / "devices.toml"], words)
    assert config.shared_device("logprob") is config.devices[0]
    passing = PassingScorer(Path(config.model.path))
    passing.off_load()
    passing.load_back()


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.backend=megatron", "--logprob.backend=megatron"],
        ["--trainer.ranks=2", '--trainer.hosts=["b:29400"]', "--weights.secret=env:SECRET"],
    ],
)
def test_any_mesh_has_shifts(tmp_path: Path, words: list[str]) -> None:
    """Each rank gives its memory up, whatever its layers, on whichever host."""
    (tmp_path / "devices.toml").write_text(CARD)
    config = load([EXAMPLES / "demo.toml", tmp_path / "devices.toml"], words)
    assert config.shared_device("trainer") is config.devices[0]


def test_the_example_loads_and_is_for_up_alone() -> None:
    """A worker that was started by hand would wait for a shift that nobody grants."""
    config = load([EXAMPLES / "demo.toml", EXAMPLES / "one-gpu.toml"], [])
    assert config.shared_device("rollout") == config.devices[0]
    assert config.shared_device("prompts") is None
    with pytest.raises(ConfigError, match="only `rlstreams up` grants shifts on it"):
        check_alone(config)
