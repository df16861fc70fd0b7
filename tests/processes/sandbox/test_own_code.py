"""A loss, an advantage or an optimizer of the user's own that cannot be used is refused before a
run starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.check.doctor.check import Level
from rlstreams.check.doctor.own_code import own_code_check
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.loop.agreement import own_code
from rlstreams.workers.trainer.training.made_up import made_up, unweighted

LOSSES = {
    "def loss(tokens, rows): return -tokens.policy_N": r"loss\(tokens, rows\) cannot be called",
    "def lose(tokens): return -tokens.policy_N": r"no function 'loss' .*did you mean 'lose'",
    "def loss(tokens) return 1": r"my\.py:1: SyntaxError",
    "import nowhere\ndef loss(tokens): ...": r"my\.py:1: ModuleNotFoundError: .*'nowhere'",
    "async def loss(tokens): ...": "must be a plain function",
    "def loss(tokens): return 1 / 0": r"my\.py:1: ZeroDivisionError",
    "def loss(tokens): return None": "gave NoneType for losses, not a tensor",
    "def loss(tokens): return -tokens.policy_N.mean()": r"shape \(\) .*\(12,\).* one for each",
    "def loss(tokens): return -tokens.policy_N, tokens.policy_N[:3], None": "ratios of shape",
    "def loss(tokens): return -tokens.policy_N.detach()": "losses without gradient",
    "def loss(tokens): return 0 * tokens.policy_N + tokens.weights_N": "has no gradient",
    "def loss(tokens): return tokens.policy_N / (tokens.weights_N * 0)": "gave a loss of -?inf",
    "def loss(tokens): return (tokens.policy_N * 0).sqrt()": "gave a gradient of",
    "def loss(tokens): return -tokens.policy_N, None": "gave a tuple of 2: return the losses, or",
    "def loss(t): return -t.advantages * t.policy_N": r"my\.py:1: .*mean 'advantages_N'\?",
    "def loss(t): return t.mask": r"has no attribute 'mask'; it has advantages_N, .*weights_N",
    "def loss(t): return t.policy_N - t.reference_N": r"my\.py:1: TypeError: .*'NoneType'",
    "class loss:\n    def __init__(self, tokens): ...": "loss is a class: name a fun",
    "class L:\n    def __call__(self, t): return 1\nloss = L()": r"my\.py:2 gave int for losses",
    "import torch\ndef loss(t): return t.policy_N * torch.rand(len(t.policy_N))": "no random",
    "state = []\ndef loss(t):\n    state.append(1)\n    return t.policy_N * len(state)": "nothing",
}
ADVANTAGES = {
    "def own(samples): return [1.0]": r"gave 1 advantages for 8 samples",
    "def own(samples): return 3": "gave int, not a sequence of numbers",
    "def own(samples): return {i: s.reward for i, s in enumerate(samples)}": "gave dict: give a l",
    "def own(samples): return [s.rewards for s in samples]": r"mine\.py:1: .*mean 'reward'\?",
    "def own(samples): return ['a'] * len(samples)": "gave list, not a sequence of numbers",
    "def own(samples): return [float('nan')] + [0.0] * 7": r"gave nan for sample 0/0",
    "def own(samples): return [[1.0, 2.0]] * 8": r"\(2,\) for sample 0/0, which has 5 sampled",
    "def own(samples): return [s.parts['x'] for s in samples]": "KeyError: 'x'",
    "import random\ndef own(samples): return [random.random() for _ in samples]": "redo would not",
}
OPTIMIZERS = {
    "def own(p): return p.values - p.lr": "gave Tensor for model.embed_tokens.weight: return its n",
    "def own(p): return p.values.double(), {}": r"gave values .*torch\.float64.*the parameter is",
    "def own(p): return p.values - p.gradient, {'x': p.gradient[:1]}": "gave x for .*embed_tokens",
    "def own(p): return p.values, {}": "changed no parameter",
    "def own(p): return p.values - 1, {'low': p.gradient}": "gave a state 'low'",
    "def own(p): return p.values.add_(1), {'slow': p.values}": "share their memory: clone one",
    "def own(p): return p.values @ p.gradient.T, {}": r"gave values .*\(12, 12\)",
    "def own(p): return p.values - 1, {'old': p.values}": "share their memory: clone one",
    "def own(p): return p.values.sub_(p.momenta), {}": r"'momenta'; it has .*gradient, .*state",
    "def own(p): return p.values * float('nan'), {}": "values for .* that are not finite",
    "import torch\ndef own(p): return torch.rand_like(p.values), {}": "no random",
    "n = []\ndef own(p):\n    n.append(1)\n    return p.values - len(n), {}": "keep nothing",
    "def own(p): p.values.sub_(p.gradient)": r"gave NoneType .*as by `return values, \{\}`",
    "def own(p): return p.values - 1, None": r"gave \(Tensor, NoneType\) for model.embed_tokens",
    "from torch.optim import SGD as own": "own is a class: write a function of one parameter, ",
    "def own(p): return 0.1": "gave float for .*: return its new values and a dict of its state",
    "def own(p): return p.values - 1, {'L': p.gradient @ p.gradient.T}": "of its form, and numbers",
    "def own(p): return p.values - 1, {'exp_avg': 1.0}": "gave exp_avg .* are float, not a tensor",
    "def own(p): return p.values - 1, {'step': p.gradient}": "'step' .* that is not a number",
    "def own(p): p.values -= 1": "'values'; return .* a method such as `sub_`",
    "def own(p): return p.values - p.state['m'], {}": r"'m'; .*embed_tok\S+ of shape \(12, 4\), no",
    "def own(p): return p.values - 1 % (p.values.ndim - 1), {}": "for model.norm",
}  # fmt: skip


def config_of(folder: Path, **code: str) -> RunConfig:
    """Code by the field that it stands for."""
    for field, text in code.items():
        (folder / f"{field}.py").write_text(text, encoding="utf-8")
    names = {"my": ("kind", "loss"), "mine": ("advantage", "own")}
    named = {names[f][0]: f"{folder / f}.py:{names[f][1]}" for f in code}
    run = RunConfig()
    loss = LossSection(**named)  # type: ignore[arg-type]
    return replace(
        run,
        trainer=replace(run.trainer, loss=loss),
        prompts=replace(run.prompts, group_size=4),
    )


def config_with(folder: Path, optimizer: str) -> RunConfig:
    """An optimizer of this text."""
    (folder / "opt.py").write_text(optimizer, encoding="utf-8")
    config, kind = RunConfig(), f"{folder / 'opt.py'}:own"
    trainer = replace(config.trainer, optimizer=OptimizerSection(kind=kind))
    return replace(config, trainer=trainer)


def tried(config: RunConfig) -> list[str]:
    return made_up(config.trainer, config.prompts.group_size, (), own_code(config))


@pytest.mark.parametrize("text", LOSSES)
def test_a_loss_that_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)trainer\.loss\.kind: .*{LOSSES[text]}"):
        tried(config_of(tmp_path, my=text))


@pytest.mark.parametrize("text", ADVANTAGES)
def test_an_advantage_that_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)trainer\.loss\.advantage: .*{ADVANTAGES[text]}"):
        tried(config_of(tmp_path, mine=text))


@pytest.mark.parametrize("text", OPTIMIZERS)
def test_an_optimizer_that_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)trainer\.optimizer\.kind: .*{OPTIMIZERS[text]}"):
        tried(config_with(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "def own(p): return p.values - 1, {'step': int(p.state.get('step', 0)) + 1}",
        "def own(p): return p.values - 1, {'worst': float('nan')}",
        "import torch\ndef own(p): return torch.nn.Parameter(p.values - 1), {}",
        "own = lambda p: (p.values - 1, {})",
    ],
)
def test_an_optimizer_that_can_be_used_is_taken(tmp_path: Path, text: str) -> None:
    assert "called twice with made-up parameter" in tried(config_with(tmp_path, text))[0]


@pytest.mark.parametrize(
    ("signature", "advice"),
    [
        ("tokens, *, most=1.0", r"its options are most; did you mean 'most'\?"),
        ("tokens, *, power=0.5", "its options are power$"),
        ("tokens", r"write `def loss\(tokens, \*, mots\):`"),
    ],
)
def test_an_option_of_another_name_is_told_from_a_function_without(
    tmp_path: Path, signature: str, advice: str
) -> None:
    config = config_of(tmp_path, my=f"def loss({signature}): return -tokens.policy_N")
    loss = replace(config.trainer.loss, options={"mots": 2.0})
    with pytest.raises(ConfigError, match=f"unexpected keyword argument 'mots'; {advice}"):
        tried(replace(config, trainer=replace(config.trainer, loss=loss)))


def test_two_results_that_differ_are_shown_by_their_first_difference(tmp_path: Path) -> None:
    text = "n = []\ndef own(samples):\n    n.append(1)\n    return [0.0] * 7 + [float(len(n))]"
    with pytest.raises(ConfigError, match="gave 1, then 2 for the same samples: a redo would not"):
        tried(config_of(tmp_path, mine=text))


def test_a_file_that_is_not_there_or_hides_one_of_python_s_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, my="import json\ndef loss(tokens): ...")
    (tmp_path / "json.py").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"imports json\.py, and Python has a module"):
        tried(config)
    (tmp_path / "my.py").rename(tmp_path / "mu.py")
    with pytest.raises(ConfigError, match=r"my\.py is not there; did you mean '.*mu\.py'"):
        own_code_check(config)


def test_a_process_of_its_own_tries_both(tmp_path: Path) -> None:
    """One that ends that process, or hangs in it, ends nobody else."""
    one = "def own(samples): return [[s.reward] * s.num_tokens for s in samples]"
    good = config_of(tmp_path, my="def loss(t): return -t.weights_N * t.policy_N", mine=one)
    found = own_code_check(good)
    assert found is not None
    assert f"{tmp_path / 'my.py'}:1 was called twice with made-up tokens" in found.found
    assert f"{tmp_path / 'mine.py'}:1 was called twice with made-up samples" in found.found
    assert (found.level, own_code_check(RunConfig())) == (Level.OK, None)
    bad = config_of(tmp_path, my="import os\ndef loss(tokens): os._exit(3)")
    with pytest.raises(ConfigError, match=r"trainer\.loss\.kind: loaded, .* its process .*3"):
        own_code_check(bad)
    hangs = config_of(tmp_path, my="import time\ntime.sleep(600)")
    with pytest.raises(ConfigError, match="did not come back within 3 s"):
        own_code_check(hangs, limit_s=3.0)


def test_a_file_beside_the_run_with_a_name_of_python_s_does_not_break_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch imports `glob`: it is Python's."""
    (tmp_path / "glob.py").write_text("raise ValueError('not mine')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = own_code_check(config_with(tmp_path, "def own(p): return p.values - p.lr, {}"))
    assert found is not None
    assert found.level is Level.OK


def test_a_class_of_a_large_package_is_refused_before_all_of_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch has 46 MB of source: to read it took more than a minute."""
    trainer = RunConfig().trainer
    section = OptimizerSection(kind="torch.optim.sgd:SGD")
    read, ours = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or ours(path))
    with pytest.raises(ConfigError, match=r"'torch\.optim\.sgd:SGD', .* more than 1,000,000 bytes"):
        own_code(replace(RunConfig(), trainer=replace(trainer, optimizer=section)))
    assert len(read) < 200


def test_a_loss_that_forgets_the_weights_is_told_what_that_costs(tmp_path: Path) -> None:
    config = config_of(tmp_path, my="def loss(tokens): return -tokens.policy_N")
    found = own_code_check(config)
    assert found is not None
    assert found.level is Level.WARN
    says = "1 does not use tokens.weights_N: nothing comes of trainer.loss.correction = 'truncate'"
    assert f"{tmp_path / 'my.py'}:{says}" in found.found
    uncorrected = replace(config.trainer.loss, correction="none")
    assert unweighted(uncorrected, own_code(config)) == ""


GSPO = """
import torch

def loss(tokens, low=0.03, high=0.04):
    pairs = zip(*(torch.split(values, list(tokens.counts_R)) for values in tokens[:2]))
    means = [(new - old).mean().expand(len(new)) for new, old in pairs]
    s, a = torch.cat(means).exp(), tokens.advantages_N
    return -tokens.weights_N * torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a), s, None
"""


def test_a_loss_with_narrow_bounds_is_taken(tmp_path: Path) -> None:
    """Of the made-up rows one has ratios of 1, so that bounds leave it its gradient."""
    assert tried(config_of(tmp_path, my=GSPO)) != []


def test_modules_of_the_code_are_nobody_else_s(tmp_path: Path) -> None:
    """Two of one name go side by side, and neither stays where imports look."""
    import sys

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared_name.py").write_text(f"NAME = {folder!r}\n", encoding="utf-8")
    text = "def own(samples):\n    import shared_name\n    return [ord(shared_name.NAME)] * 8\n"
    for folder in ("a", "b"):
        config = config_of(tmp_path / folder, mine=text)
        before = list(sys.path), set(sys.modules)
        assert tried(config) != []
        assert "shared_name" not in sys.modules
        assert before[0] == sys.path
