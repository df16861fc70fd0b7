"""A reward that was edited while its run goes on, or between two starts: named, and not mixed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.schemas.events import TrainerStarted
from rlstreams.show.report.facts import claim_changes, differences, judges_line
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import STEPS
from rlstreams.streams.views.run import step_point
from rlstreams.up.supervisor.up import file_changes
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.agreement import files_of, judged_by, user_code_hashes
from rlstreams.workers.loop.compared import ClaimCheck
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.log import Log
from rlstreams.workers.trainer.facts import make_claim
from tests import factories
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog
from tests.unit.workers.test_stage import make_log

OURS = RunConfig()
Write = Callable[[str], RunConfig]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A run's configuration, whose reward is a file of this text."""

    def make(text: str) -> RunConfig:
        (tmp_path / "reward.py").write_text(f"def score(*_): return {text}\n")
        reward = replace(OURS.reward, verifier=f"{tmp_path / 'reward.py'}:score")
        return replace(OURS, reward=reward)

    return make


def claim_of(config: RunConfig, epoch: int = 1) -> TrainerStarted:
    return factories.trainer_started(
        config=resolved_json(config), epoch=epoch, hashes=user_code_hashes(config)
    )


def context_of(
    log: MemoryLog, config: RunConfig, role: str = "rollout", claims_after: int | None = 0
) -> Context:
    """Of a worker that is started now."""
    return Context(
        config=config,
        bus=MemoryBus(log, "run"),
        role=role,
        ordinal=0,
        instance="i2",
        claims_after=claims_after,
        files=files_of(config, role),
    )


def check(context: Context) -> None:
    """What a worker does before anything else."""
    ClaimCheck(context).at_start()


def claimed(*claims: TrainerStarted) -> MemoryLog:
    log = make_log()
    pen = MemoryBus(log, "run").producer("trainer.0")
    for claim in claims:
        pen.commit([outgoing(STEPS, claim)])
    return log


def test_a_worker_that_starts_again_beside_edited_code_ends_by_name(write: Write) -> None:
    """Under `up`, before it does anything: the claim of this `up`'s own trainer binds at once."""
    log = claimed(claim_of(write("1.0")))
    check(context_of(log, write("1.0")))
    edited = write("2.0")

    with pytest.raises(ConfigError, match=r"reward\.verifier: reward\.py has SHA-256 ") as refused:
        check(context_of(log, edited))

    for hashes in (files_of(edited, "rollout"), user_code_hashes(write("1.0"))):
        assert hashes["reward.verifier: reward.py"][:12] in str(refused.value)
    assert "--resume" in str(refused.value)
    check(context_of(log, edited, claims_after=1))  # `up` was started again: that claim is past
    check(context_of(log, edited, role="logprob"))  # runs none of it


def test_with_record_it_goes_on(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so; its samples say by what they were judged."""
    said: list[str] = []
    monkeypatch.setattr(Log, "warning", lambda _, event, **of: said.append(f"{event} {of}"))
    log = claimed(claim_of(write("1.0")))
    edited = write("2.0")
    check(context_of(log, replace(edited, run=replace(edited.run, on_changed_code="record"))))
    (line,) = (line for line in said if line.startswith("changed_code"))
    assert "reward.verifier: reward.py has SHA-256" in line


def test_a_trainer_that_is_started_again_claims_no_edited_code(write: Write) -> None:
    """Its living workers run what its predecessor claimed; a resumed run's trainer claims it."""
    first = claim_of(write("1.0"))
    edited = write("2.0")
    log = claimed(first)
    bus = MemoryBus(log, "run")
    same = replace(
        first,
        hashes=first.hashes | {"model": "m"},
        topic_ids=dict(bus.topic_ids(["prompts"])),
        partitions={"prompts": bus.partitions("prompts")},
    )
    ledger = Ledger(keeps_steps=True)
    ledger.apply(same)

    with pytest.raises(ConfigError, match=r"trainer-0, and the trainer of epoch 1.*reward\.py has"):
        make_claim(context_of(log, edited, "trainer"), bus, ledger, "m", {})

    resumed = make_claim(context_of(log, edited, "trainer", claims_after=1), bus, ledger, "m", {})
    assert user_code_hashes(edited).items() <= resumed.hashes.items()


def test_a_resumed_run_names_the_edited_file(write: Write) -> None:
    """In the output of `up`, and where report and page tell of claims."""
    before = claim_of(write("1.0"))
    edited = write("2.0")
    name = "SHA-256 of reward.verifier: reward.py"
    was, is_ = (
        h["reward.verifier: reward.py"][:12] for h in (before.hashes, user_code_hashes(edited))
    )
    assert [(name, was, is_)] == file_changes(edited, before)
    assert [] == file_changes(write("1.0"), before)
    found = claim_changes([before, claim_of(write("2.0"), epoch=2), claim_of(edited, epoch=3)])
    assert ["", f"{name}: {was} -> {is_}", ""] == found


def test_the_report_says_with_which_claim_a_library_or_our_code_was_another() -> None:
    """And of a field that the older release did not know, only a value that computes otherwise."""
    tree = json.loads(resolved_json(RunConfig()))
    del tree["trainer"]["loss"]["clip_dual"], tree["guard"]
    versions = {"commit": "aa", "torch": "2.10.0"}, {"commit": "bb", "torch": "2.11.0"}
    old, new = (
        factories.trainer_started(config=config, versions=of, hashes={})
        for config, of in zip((json.dumps(tree), resolved_json(RunConfig())), versions, strict=True)
    )
    changed = (
        "trainer's commit: aa -> bb; trainer's torch: 2.10.0 -> 2.11.0; "
        "trainer.loss.clip_dual: 0.0 -> 3.0"
    )
    assert ["", changed] == claim_changes([old, new])
    unnamed = replace(old, config="{}")  # it tells no field, so not that it had our default
    fields = {name: of_both for name, *of_both in differences([[unnamed], [new]])}
    assert ["-", "1e-05"] == fields["trainer.optimizer.lr"]


def test_the_report_says_from_which_step_on_rewards_are_others() -> None:
    points = [
        step_point(factories.step_completed(step, judged_by=judges))
        for step, judges in enumerate(({"": 8}, {"aa": 8}, {"aa": 8}, {"aa": 4, "bb": 4}), 1)
    ]
    assert "" == judges_line(points[:3])
    expected = (
        "from step 2 on judged by aa; from step 4 on judged by aa; from step 4 on judged by bb"
    )
    assert expected.replace("; from step 4 on judged by aa", "") == judges_line(points)


@pytest.mark.parametrize("where", ["verifier", "part"])
def test_a_judge_s_template_and_parser_count_as_its_code(tmp_path: Path, where: str) -> None:
    """They decide the reward as much; so does any file that an option names."""
    template, parser, terms = (tmp_path / name for name in ("t.jinja", "parse.py", "terms.txt"))
    for file in (template, parser, terms):
        file.write_text("1")
    options = {
        "url": "http://j",
        "model": "m",
        "template_file": str(template),
        "parse": f"{parser}:read",
        "terms_file": str(terms),
    }
    if where == "verifier":
        section = replace(OURS.reward, verifier="judge", options=options)
    else:
        part = {"verifier": "judge", "options": options}
        section = replace(OURS.reward, verifier="sum", parts=(_part(**part),))
    config = replace(OURS, reward=section)
    before = user_code_hashes(config)
    place = "reward.options" if where == "verifier" else "reward.parts 'judge'.options"
    expected = {f"{place}.template_file: t.jinja", f"{place}.parse: parse.py"}
    assert expected | {f"{place}.terms_file: terms.txt"} == before.keys()
    for file in (template, parser, terms):
        file.write_text("2")
        after = user_code_hashes(config)
        assert 1 == len(set(after.items()) - set(before.items()))
        assert judged_by(config, after) != judged_by(config, before)
        before = after


def _part(**values: object) -> object:
    from rlstreams.workers.config.reward import RewardPart

    return RewardPart(**values)  # type: ignore[arg-type]


def test_what_decides_a_reward_is_in_its_digest(write: Write) -> None:
    """Settings and code; not where they lie, nor how many processes run them."""
    one = write("1.0")
    digest = judged_by(one, files_of(one, "rollout"))
    busier = replace(one, reward=replace(one.reward, processes=9, timeout_s=1.0))
    assert digest == judged_by(busier, files_of(one, "rollout"))
    strict = replace(one, reward=replace(one.reward, require_stop=False))
    assert digest != judged_by(strict, files_of(one, "rollout"))
    two = write("2.0")
    assert digest != judged_by(two, files_of(two, "rollout"))
