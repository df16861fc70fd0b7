"""A run of which one group is poisoned: its step and the group are named; of a clean run nobody."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from rlstreams.debug.blame import bisect as module
from rlstreams.debug.blame.band import Band
from rlstreams.debug.blame.bisect import Bisected, bisect
from rlstreams.debug.blame.blame import Blamed, blame
from rlstreams.debug.blame.text import lines
from rlstreams.debug.rerun.rebuilt import RerunError
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import TOPICS
from rlstreams.words.spelling import NUMBERS
from tests.heavy.blame.run_stand import BAD_STEP, Run, small_run
from tests.memory.bus import MemoryBus

SPAN = range(BAD_STEP - 1, BAD_STEP + 1)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of twelve steps the eighth has a group whose right answers are punished, a hundredfold."""
    return small_run(tmp_path_factory.mktemp("poisoned"), 0, "inverted and scaled")


@pytest.fixture(scope="module")
def num_before(poisoned: Run) -> int:
    """Records of the run, before anybody looked for who is to blame."""
    return num_records(poisoned)


@pytest.fixture(scope="module")
def by_store(poisoned: Run, num_before: int) -> Bisected:
    """Where it departs, by versions of its weight store: no step is done again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "rebuilt", lambda *_, **__: pytest.fail("a step was done again"))
        return bisected(poisoned)


def blamed(run: Run, steps: range, **options) -> Blamed:
    folders = [run.folder / "checkpoints"]
    return blame(run.opened(), run.config, steps, checkpoints=folders, spelled=NUMBERS, **options)


def bisected(run: Run) -> Bisected:
    folders = [run.folder / "checkpoints"]
    band = Band(low=0.45, high=2.0)
    return bisect(run.opened(), run.config, "held-out", band=band, checkpoints=folders)


def test_versions_of_the_store_are_those_of_the_steps(poisoned: Run, by_store: Bisected) -> None:
    """With a weight store no step is done again; without it the same versions give the same."""
    store, away = poisoned.folder / "store", poisoned.folder / "away"
    store.rename(away)
    by_steps = bisected(poisoned)
    away.rename(store)
    assert by_store == by_steps
    assert by_store.again


def num_records(run: Run) -> int:
    bus = MemoryBus(run.log, "demo")
    return sum(sum(bus.ends(topic.name).values()) for topic in TOPICS)


def test_step_and_group_are_named(poisoned: Run, by_store: Bisected, num_before: int) -> None:
    """By versions between two evaluations, then by leaving groups out; nothing is written."""
    assert by_store.departure is not None
    assert by_store.departure.point.step in (BAD_STEP, BAD_STEP + 1)
    assert {BAD_STEP - 2, BAD_STEP - 1} & set(by_store.again), "no version in between was evaluated"

    who = blamed(poisoned, SPAN, metric="held_out", at=BAD_STEP + 2)
    assert [poisoned.bad] == [one.name for one in who.to_blame]
    (one,) = who.to_blame
    assert one.again is not None
    assert (-0.15, -0.15) > (one.effect, one.again)
    assert {f"{poisoned.bad.split()[1]}/{n}" for n in range(8)} == {s.sample for s in one.samples}
    text = "\n".join(lines(who))
    assert f"to blame: {poisoned.bad}" in text
    assert "reward -100" in text
    assert num_before == num_records(poisoned)


def test_other_rewards_and_other_sets(poisoned: Run) -> None:
    """With the rewards that it should have had the gradient is as ever; a worker is a set too."""
    group = poisoned.bad.split()[1]
    at = {"metric": "grad_norm", "at": BAD_STEP}
    steps = range(BAD_STEP, BAD_STEP + 1)
    bad = next(e for e in blamed(poisoned, steps, **at).effects if e.name == poisoned.bad)
    right = {(group, int(s.sample.split("/")[1])): (100 - s.reward) / 200 for s in bad.samples}
    assert {0.0, 1.0} == set(right.values())
    mended = blamed(poisoned, steps, rewards=right, **at)
    assert (poisoned.bad, 1) == (mended.effects[0].name, mended.num_sets)
    assert 20 * mended.without < mended.now
    workers = blamed(poisoned, steps, by="worker", **at)
    assert {"worker rollout-0", "worker rollout-1"} == {one.name for one in workers.effects}


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["entropy", "held_out"])
def test_of_a_clean_run_nobody_is_accused(metric: str, tmp_path: Path) -> None:
    """By any metric of a version, nor by leaving out sets."""
    run = small_run(tmp_path, 1)
    folders = [run.folder / "checkpoints"]
    for name in ("held_out", "reward", "entropy", "kl", "grad_norm", "loss"):
        found = bisect(run.opened(), run.config, name, checkpoints=folders)
        assert found.departure is None, name
    who = blamed(run, SPAN, metric=metric)
    assert who.to_blame == (), asdict(who)


@pytest.mark.parametrize(
    ("steps", "options", "told"),
    [
        (range(40, 41), {"metric": "entropy"}, r"step 40 was never completed.*steps 1 to 12"),
        (range(8, 9), {"metric": "entorpy"}, r"no such metric; did you mean 'entropy'"),
        (range(8, 9), {"metric": "reward"}, r"reward is of samples as they were recorded"),
        (range(8, 9), {"metric": "mismatch"}, r"recorded log-probs.*--at 8"),
        (range(8, 9), {"metric": "kl", "at": 3}, r"--at 3 lies before the last"),
        (range(8, 9), {"metric": "kl", "at": 30}, r"--at 30: the log holds steps up to 12"),
        (range(8, 9), {"metric": "kl", "by": "agent"}, r"--by agent: the log does not say which"),
        (range(8, 9), {"metric": "kl", "by": "host"}, r"--by host: the log does not say which"),
    ],
)
def test_bad_input_is_named(poisoned: Run, steps: range, options, told: str) -> None:
    with pytest.raises((ConfigError, RerunError), match=told):
        blamed(poisoned, steps, **options)
