"""What was changed on its way is named by the log alone; of a clean run nothing is."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.debug.evidence.evidence import evidence
from rlstreams.debug.evidence.findings import (
    ADVANTAGES,
    RECORDS,
    REWARDS,
    SCORES,
    TOKENS,
    WEIGHTS,
    Evidence,
)
from rlstreams.debug.evidence.text import lines
from rlstreams.debug.replay.record import RecordingOptions, record
from rlstreams.debug.rerun.rebuilt import RerunError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES
from rlstreams.words.spelling import NUMBERS, spelling
from rlstreams.workers.trainer.claim import read_ledger
from tests.heavy.blame.run_stand import POISONS, SAMPLES, Poison, Run, Stand, with_reward
from tests.memory.log import named

GROUPS, STEP, LAST = 4, 3, 4


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Stand:
    """Two sound steps."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    stand = Stand(folder, 0, steps=LAST, groups=GROUPS, trainer__checkpoint_every=2)
    stand.go_on(STEP - 1)
    return stand


def ended(begun: Stand, folder: Path, poison: Poison | None = None) -> Run:
    stand = begun.fork(folder / "fork")
    stand.go_on(LAST, STEP, poison)
    return stand.run()


def checked(run: Run, steps: range = range(1, LAST + 1), **options) -> Evidence:
    spelled = spelling("", run.config.model.path)
    folders = [run.folder / "checkpoints"]
    given = {"spelled": spelled, "redo": True, "checkpoints": folders, **options}
    return evidence(run.opened(), run.config, steps, **given)


def told(found: Evidence) -> dict[str, int]:
    return {check.name: len(check.found) for check in found.checks if check.found}


def test_of_a_clean_run_everything_agrees(begun: Stand, tmp_path: Path) -> None:
    run = ended(begun, tmp_path)
    found = checked(run)
    num = LAST * GROUPS * SAMPLES
    agreed = {check.name: check.num_agreed for check in found.checks}
    samples = dict.fromkeys((RECORDS, REWARDS, TOKENS, SCORES, ADVANTAGES), num)
    assert {**samples, WEIGHTS: LAST} == agreed
    assert [check.unchecked for check in found.checks] == [Counter()] * 6
    assert (
        lines(found, "runs/demo")[0] == "steps 1 to 4: nothing contradicts the log of 128 samples."
    )


@pytest.mark.parametrize(
    ("poison", "by"),
    [
        ("rewards inverted", {REWARDS}),
        ("tokens swapped", {REWARDS, TOKENS, SCORES}),
        ("tokens swapped behind the scorer", {RECORDS, SCORES}),
    ],
)
def test_the_step_and_the_group_are_named(
    poison: str, by: set[str], begun: Stand, tmp_path: Path
) -> None:
    """By each check that can see it, and by no other; the text says so first."""
    run = ended(begun, tmp_path, POISONS[poison])
    found = checked(run)
    assert (STEP, [run.bad]) == (found.first_step, [f"group {one}" for one in found.by_group])
    assert by == told(found).keys()
    if poison != "tokens swapped":
        assert set(told(found).values()) == {SAMPLES}
    scan, of_step = (lines(found, "runs/demo", is_scan=is_scan) for is_scan in (True, False))
    assert scan[0] == f"Step {STEP} is the first that contradicts itself."
    assert of_step[0].startswith(f"{run.bad.capitalize()} (step {STEP}) is to blame: 8 samples")
    assert f"which samples: rlstreams replay blame runs/demo --steps {STEP}" in scan
    assert f"go on without it: rlstreams replay branch runs/demo --at {STEP - 1}" in of_step


def test_a_reward_that_was_changed_behind_the_sampler_contradicts_its_record(
    begun: Stand, tmp_path: Path
) -> None:
    changed = replace(with_reward(lambda one: 1 - one.reward), is_scored=False)
    found = checked(ended(begun, tmp_path, changed), redo=False)
    assert {RECORDS: SAMPLES, REWARDS: SAMPLES} == told(found)
    assert "reward was" in found.found[0].message


def test_what_cannot_be_checked_is_told_and_accuses_nobody(begun: Stand, tmp_path: Path) -> None:
    """Retention, no tokenizer, a judge behind a server, an agent's own number; no such step."""
    run = ended(begun, tmp_path, POISONS["rewards inverted"])

    def reason(check: str, **options) -> str:
        found = checked(run, range(STEP, STEP + 1), redo=False, **options)
        (one,) = (c for c in found.checks if c.name == check)
        assert not one.found
        assert one.unchecked.total() == GROUPS * SAMPLES
        return str(one.unchecked)

    assert "no tokenizer" in reason(REWARDS, spelled=NUMBERS)
    section, config = run.config.reward, run.config
    for verifier, why in (("judge", "replay judge"), ("agent", "its agents gave the rewards")):
        run = replace(run, config=replace(config, reward=replace(section, verifier=verifier)))
        assert why in reason(REWARDS)
    run = replace(run, config=config)
    for topic in (TRAJECTORIES, PROMPTS):
        place = named("demo", Partition(topic.name, 0))
        run.log.trim(place, run.log.range(place)[1])
    assert "does not hold what was sampled" in reason(RECORDS)
    assert "not in the log" in reason(REWARDS)
    oldest = read_ledger(run.opened().bus, "test").steps[STEP].oldest[0]
    run.log.trim(named("demo", Partition(SCORED.name, 0)), oldest)
    found = checked(run, redo=False)
    assert (STEP, LAST) == (found.first, found.last)
    assert "of 2 steps records are gone" in str(found.checks[0].unchecked)
    with pytest.raises(RerunError, match=r"step 40 was never completed.*steps 1 to 4"):
        checked(run, range(40, 41))


def test_the_commands_say_it_of_a_recording(
    begun: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bisect` names the step, and goes on to a metric; `blame` names the group, and is over."""
    run = ended(begun, tmp_path, POISONS["rewards inverted"])
    folder = tmp_path / "rec"
    record(run.opened().bus, run.config, RecordingOptions(folder=folder))
    assert main(["replay", "bisect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Step {STEP} is the first that contradicts itself.")
    assert "entropy: no step" in out
    checkpoints = ("--checkpoints", str(run.folder / "checkpoints"))
    words = ["replay", "blame", str(folder), "--steps", f"{STEP}:{LAST}", *checkpoints]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert ["evidence"] == list(said)
    assert [run.bad.split()[1]] == said["evidence"]["groups"]
    wrong = {c["check"]: len(c["contradict"]) for c in said["evidence"]["checks"]}
    assert {REWARDS: SAMPLES} == {check: num for check, num in wrong.items() if num}


PAID = """
def paid(prompt, completion, answer, metadata):
    return float("~" in completion)
"""


def test_a_grader_that_is_wrong_by_its_code_agrees_with_itself_and_not_with_another(
    begun: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From step 3 on it pays for a sign that guesses begin with."""
    plain = spelling("", begun.config.model.path).plain
    paid = with_reward(lambda one: float("~" in plain(one.segments[1].token_ids.numpy().tolist())))
    run = ended(begun, tmp_path, replace(paid, lasts=True))
    (tmp_path / "wrong.py").write_text(PAID)
    section = replace(run.config.reward, verifier=f"{tmp_path}/wrong.py:paid", processes=1)
    own = replace(run, config=replace(run.config, reward=section))
    assert told(checked(own, range(STEP, LAST + 1), redo=False)) == {}

    folder = tmp_path / "rec"
    record(run.opened().bus, run.config, RecordingOptions(folder=folder))
    assert main(["replay", "bisect", str(folder), "--verifier", "numeric"]) == 0
    out = capsys.readouterr().out
    assert f"From step {STEP} on they differ more: " in out
    checkpoints = ("--checkpoints", str(run.folder / "checkpoints"))
    words = ["replay", "blame", str(folder), "--steps", f"{STEP - 1}:{LAST}", *checkpoints]
    assert main([*words, "--verifier", "numeric", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert ["evidence", "opinion"] == list(said)  # no experiment
    assert {STEP, LAST} == {one["step"] for one in said["opinion"]["differing"]}
    assert all(one["was"] != one["said"] for one in said["opinion"]["differing"])


LOTS = """
import itertools
draws = itertools.count()

def drawn(prompt, completion, answer, metadata):
    return float(next(draws) % 3)
"""


def test_a_grader_that_draws_lots_accuses_nobody(begun: Stand, tmp_path: Path) -> None:
    run = ended(begun, tmp_path)
    (tmp_path / "lots.py").write_text(LOTS)
    section = replace(run.config.reward, verifier=f"{tmp_path}/lots.py:drawn", processes=1)
    found = checked(replace(run, config=replace(run.config, reward=section)), redo=False)
    (rewards,) = (check for check in found.checks if check.name == REWARDS)
    assert not rewards.found
    assert "the grader draws lots" in str(rewards.unchecked)


def test_rewards_that_are_permuted_on_purpose_contradict_nothing(tmp_path: Path) -> None:
    """A control run: its advantages are of other samples' rewards, as its configuration says."""
    stand = Stand(tmp_path / "run", 1, steps=2, groups=GROUPS, trainer__control="permuted")
    stand.go_on(2)
    assert told(checked(stand.run(), redo=False)) == {}
