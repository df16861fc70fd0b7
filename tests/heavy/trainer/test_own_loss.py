"""A loss and an advantage of one's own: they train, are redone from the log, and are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlstreams.__main__ import main
from rlstreams.debug.rerun.rebuilt import steps_again
from rlstreams.debug.rerun.rerun import changed_config, rerun
from rlstreams.schemas.events import (
    DeadLetter,
    ScoredTrajectory,
    StepsRedone,
    Tensor,
    TrainerStarted,
    WorkerReport,
)
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import DEAD_LETTERS, STEPS, WORKER_EVENTS
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.runtime import Exit, exit_status
from rlstreams.workers.sandbox.recorded import OwnCodeError, slow_call
from tests.heavy.trainer.own_code import BOUNDS, BY_TURN, CENTRED, PPO, write
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    read,
    scored,
    send,
    steps,
    tick_until,
    train,
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog
from tests.unit.inspect.told_run import recorded


def own(folder: Path, **changes: object) -> RunConfig:
    """A run in a folder with these two functions of its own."""
    code = folder / "code"
    write(code, my_loss=PPO, bounds=BOUNDS, my_advantage=CENTRED)
    named = {
        "trainer.loss.kind": f"{code / 'my_loss.py'}:loss",
        "trainer.loss.advantage": f"{code / 'my_advantage.py'}:advantage",
    }
    return make_config(folder, **named, **changes)


def trained(config: RunConfig, num: int = 3) -> MemoryLog:
    log = make_log()
    trainer = make_trainer(log, config)
    train(log, trainer, num)
    bury(trainer)
    return log


def with_proximal(sample: ScoredTrajectory, value: float) -> ScoredTrajectory:
    logprobs = Tensor.of(np.full(5, value, np.float32))
    scores = tuple(replace(score, proximal_logprobs=logprobs) for score in sample.scores)
    return replace(sample, scores=scores)


def hashes(log: MemoryLog) -> list[str]:
    return [step.weight_hash for step in steps(log)]


def claims(log: MemoryLog) -> list[TrainerStarted]:
    return [event for event in read(log, STEPS.name) if isinstance(event, TrainerStarted)]


def details(log: MemoryLog) -> list[str]:
    reports = read(log, WORKER_EVENTS.name)
    return [event.detail for event in reports if isinstance(event, WorkerReport)]


def test_ppo_of_ones_own_gives_the_bits_of_ours(tmp_path: Path) -> None:
    """With advantages of one's own that are Dr. GRPO's, too, and those by token."""
    ours = trained(make_config(tmp_path / "ours", **{"trainer.loss.normalize_std": "false"}))
    theirs = trained(own(tmp_path / "theirs"))
    assert hashes(ours) == hashes(theirs)
    assert [s.metrics["clip_fraction"] for s in steps(ours)] == [
        s.metrics["clip_fraction"] for s in steps(theirs)
    ]
    config = own(tmp_path / "tokens")
    write(tmp_path / "tokens" / "code", my_advantage=BY_TURN)
    assert hashes(ours) == hashes(by_token := trained(config))
    assert steps(ours)[0].samples == steps(by_token)[0].samples


def test_a_killed_trainer_is_redone_with_the_recorded_code(tmp_path: Path) -> None:
    """Though the files were edited meanwhile; its supervisor's next trainer goes on with that code,
    and the next start of the run with the new one."""
    config = own(
        tmp_path, **{"trainer.loss.options.low": 0.1, "trainer.redo": "exact", "trainer.steps": 9}
    )
    log = trained(config)
    code = tmp_path / "code"
    write(
        code, bounds=BOUNDS.replace(".clamp(1 - low, 1 + high)", ""), my_advantage="def advantage("
    )

    def again(num: int, claims_after: int | None) -> TrainerStarted:
        trainer = make_trainer(log, config, str(num), takeover=True, claims_after=claims_after)
        train(log, trainer, num)
        bury(trainer)
        redone = [event for event in read(log, STEPS.name) if isinstance(event, StepsRedone)]
        assert redone[-1].num_equal == redone[-1].last_step - redone[-1].first_step + 1 == num - 1
        return claims(log)[-1]

    first = claims(log)[0]
    assert first.code["trainer.loss.kind: bounds.py"] == BOUNDS
    assert first.code.keys() <= first.hashes.keys()
    assert again(4, claims_after=0).code == first.code
    write(code, my_advantage=CENTRED)
    resumed = again(5, claims_after=2)
    assert resumed.code != first.code
    assert (
        resumed.hashes["trainer.loss.kind: bounds.py"]
        != first.hashes["trainer.loss.kind: bounds.py"]
    )
    found = rerun(MemoryBus(log, "demo"), config, 1, checkpoints=[])
    assert found.is_equal
    assert sorted((line.split()[1], line.endswith("NOT as it is here")) for line in found.code) == [
        ("bounds.py", True),
        ("my_advantage.py", False),
        ("my_loss.py", False),
    ]
    every = list(steps_again(MemoryBus(log, "demo"), config))
    assert [found for _, found in every] == [[]] * 5


DOES_STEPS_AGAIN = (
    ["step", "2", "{}"],
    ["trainer", "{}"],
    ["judge", "{}"],
    ["bisect", "{}", "--metric", "kl"],
    ["blame", "{}", "--steps", "2"],
    ["branch", "{}", "--at", "2"],
)


def test_code_of_a_recording_that_is_not_here_runs_only_for_who_trusts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To do somebody's steps again runs what that log holds: it can be read before."""
    monkeypatch.chdir(tmp_path)
    config = own(tmp_path)
    log = trained(config)
    bus = MemoryBus(log, "demo")
    recording = str(recorded(tmp_path / "given", bus, claims(log)[0].config))
    capsys.readouterr()

    def typed(words: list[str]) -> tuple[int, str]:
        status = main(["replay", *(word.format(recording) for word in words)])
        return status, capsys.readouterr().err

    assert (0, "") == typed(["step", "2", "{}"])
    write(tmp_path / "code", bounds="import sys\n")
    for words in DOES_STEPS_AGAIN:
        status, told = typed(words)
        assert (78, True) == (status, "trainer.loss.kind: bounds.py (SHA-256 " in told), words
        assert "my_loss.py" not in told
    assert (0, "") == typed(["step", "2", "{}", "--trust-code"])
    assert 0 == main(["config", "loss", recording])
    read_first = capsys.readouterr().out
    assert f"    {BOUNDS.splitlines()[0]}" in read_first.splitlines()
    assert "my_loss.py, as the log has it" not in read_first


def test_a_recorded_step_is_done_with_a_loss_that_was_not_there(tmp_path: Path) -> None:
    log = trained(make_config(tmp_path / "ours"), 2)
    write(tmp_path, mine="def loss(tokens, by):\n    return -by * tokens.policy_N\n")
    settings = [f"trainer.loss.kind={tmp_path / 'mine.py'}:loss", "trainer.loss.options.by=2.0"]
    config, bus = make_config(tmp_path / "ours"), MemoryBus(log, "demo")
    found = rerun(bus, config, 2, checkpoints=[], settings=settings)
    assert found.is_equal
    assert found.change is not None
    assert found.change.weight_hash != found.again.weight_hash
    plain = [settings[0].replace("mine", "plain")]  # takes no options
    write(tmp_path, plain="def loss(tokens):\n    return -tokens.policy_N\n")
    again = rerun(bus, config, 2, checkpoints=[], settings=plain).change
    assert again is not None
    assert again.settings == (f"trainer.loss.kind = {plain[0].partition('=')[2]} (was ppo)",)
    recorded = changed_config(config, settings)
    assert changed_config(recorded, plain).trainer.loss.options == {}
    assert changed_config(recorded, ["trainer.loss.kind=cispo"]).trainer.loss.kind == "cispo"
    wrong = [settings[0].replace("mine", "mien")]
    with pytest.raises(ConfigError, match="did you mean"):
        rerun(bus, config, 2, checkpoints=[], settings=wrong)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def loss(tokens):\n    raise KeyError('x')\n", r"wrong\.py:2: KeyError: 'x'"),
        (
            "def loss(tokens):\n    return tokens.policy_N[:-1]\n",
            r"wrong\.py:1 gave losses of shape",
        ),
        ("def loss(tokens):\n    return tokens.policy_N.detach()\n", "without gradient"),
    ],
)
def test_a_loss_that_fails_in_a_step_ends_the_trainer_with_its_place(
    tmp_path: Path, text: str, says: str
) -> None:
    """Nothing is lost: the run goes on from its log with the loss that is right."""
    write(tmp_path, wrong=text)
    config = own(tmp_path)
    log = trained(config, 1)
    write(tmp_path / "code", my_loss=text)
    trainer = make_trainer(log, config, "two", takeover=True)
    says = says.replace("wrong", "my_loss")
    with pytest.raises(OwnCodeError, match=rf"^step 2: .*{says}.* sample 1/0") as stop:
        train(log, trainer, 2)
    trainer.close()
    assert exit_status(stop.value) == Exit.CONFIG
    write(tmp_path / "code", my_loss=PPO)
    successor = make_trainer(log, config, "three", takeover=True)
    tick_until(successor, lambda: len(steps(log)) == 2)
    bury(successor)


def test_a_loss_that_does_not_end_is_named_in_reports(tmp_path: Path) -> None:
    """So `up` names it as it ends the trainer; a call that has come back is named no more."""
    config, ends = own(tmp_path), tmp_path / "ends"
    text = "import pathlib, time\n\ndef loss(tokens):\n"
    text += f"    while not pathlib.Path({str(ends)!r}).exists():\n        time.sleep(0.01)\n"
    write(tmp_path / "code", my_loss=text + "    return -tokens.policy_N\n")
    log = make_log()
    trainer = make_trainer(log, config)
    send(log, *(scored(0, sample, 0) for sample in range(2)))
    place = f"in trainer.loss.kind of {tmp_path / 'code' / 'my_loss.py'}:3"
    tick_until(trainer, lambda: f"step 1; {place}" in details(log))
    ends.touch()
    tick_until(trainer, lambda: len(steps(log)) == 1)
    assert slow_call() == ""
    bury(trainer)


def test_a_sample_of_which_a_loss_is_nan_is_set_aside(tmp_path: Path) -> None:
    """As one of ours; the letter names the function."""
    config = own(tmp_path, **{"trainer.loss.options.bad": -1.5})
    text = "def loss(tokens, bad):\n    nan = tokens.proximal_N == bad\n"
    text += "    return tokens.policy_N.masked_fill(nan, float('nan'))\n"
    write(tmp_path / "code", my_loss=text)
    log = make_log()
    trainer = make_trainer(log, config)
    send(log, *(with_proximal(scored(0, n, 0), -1.5 if n else -1.0) for n in range(2)))
    tick_until(trainer, lambda: bool(read(log, DEAD_LETTERS.name)))
    (letter,) = read(log, DEAD_LETTERS.name)
    assert isinstance(letter, DeadLetter)
    assert (letter.group_id, letter.sample, letter.reason) == ("0", 1, "numerics")
    assert f"by trainer.loss.kind of {tmp_path / 'code' / 'my_loss.py'}:1" in letter.detail
    bury(trainer)
