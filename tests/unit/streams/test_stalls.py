"""Each hop of the pipeline blocked in turn: the sentence names it, the worker, and since when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlstreams.schemas.events import ClosedGroups, Event
from rlstreams.streams.log.record import Committed, Partition, Position
from rlstreams.streams.views.folds import Folds
from rlstreams.streams.views.stalls import START_S, Blocked, StallFacts, StallLimits, diagnose
from tests.factories import (
    NOW_MS,
    dead_letter,
    groups_dropped,
    heartbeat,
    policy_loaded,
    policy_published,
    prompt,
    pull_requested,
    step_completed,
    trainer_started,
    trajectory,
    worker_report,
)

STALL_S = 30.0
LIMITS = StallLimits(groups_per_step=2, stall_s=STALL_S, sample_s=0.0, pull_s=0.0)
STALLED_MS = NOW_MS + 60_000
SIZE = 2
ROLES = ("prompts", "rollout", "logprob", "trainer")
# What each role says while somebody else is at fault.
IDLE = {
    "prompts": ("waiting", "for closed groups"),
    "rollout": ("waiting", "for prompts"),
    "logprob": ("waiting", "for trajectories"),
    "trainer": ("waiting", "for 2 complete groups; 1 are begun"),
}


class Run:
    """A run after step 3, with groups 10 and 11 issued; every worker reports each second."""

    def __init__(self) -> None:
        self.view = Folds()
        self.said = dict(IDLE)
        self.last_report_ms = dict.fromkeys(ROLES, STALLED_MS)
        self.committed: dict[str, dict[Partition, Committed]] | None = {
            "rollout": {},
            "logprob": {},
        }
        self.gone: frozenset[str] = frozenset()
        self.starting_s: dict[str, float] = {}
        self.take(
            trainer_started(),
            policy_published(3),
            step_completed(3, closed=ClosedGroups(watermark=10)),
            heartbeat(state="waiting"),
        )

    def take(self, *events: Event) -> Run:
        for event in events:
            self.view.apply(event)
        return self

    def issue(self, *groups: int, size: int = SIZE) -> Run:
        for offset, (group, sample) in enumerate((g, s) for g in groups for s in range(size)):
            issued = prompt(group_id=str(group), sample=sample, group_size=SIZE)
            self.view.apply(issued, Position("prompts", group % 2, offset))
        return self

    def roll_out(self, group: int, *samples: int) -> Run:
        for sample in samples:
            at = Position("trajectories", 0, 10 * group + sample)
            self.view.apply(trajectory(group_id=str(group), sample=sample), at)
        return self

    def score_below(self, offset: int) -> Run:
        assert self.committed is not None
        self.committed["logprob"][Partition("trajectories", 0)] = Committed(offset=offset)
        return self

    def says(self, role: str, state: str, detail: str = "", until_ms: int = STALLED_MS) -> Run:
        self.said[role] = (state, detail)
        self.last_report_ms[role] = until_ms
        return self

    def blocked(self, limits: StallLimits = LIMITS) -> Blocked:
        found = self.look(limits)
        assert found is not None
        return found

    def look(self, limits: StallLimits = LIMITS) -> Blocked | None:
        for role in ROLES:
            for at_ms in (NOW_MS, self.last_report_ms[role]):
                state, detail = self.said[role]
                report = worker_report(
                    worker=f"{role}-0", role=role, state=state, detail=detail, at_ms=at_ms,
                    instance="r1" if role == "rollout" else "i", policy_version=3,
                )  # fmt: skip
                self.view.apply(report)
        self.view.workers.passes(STALLED_MS)
        evidence = StallFacts(
            now_ms=STALLED_MS, waited_s=60.0, committed=self.committed or {}, gone=self.gone,
            starting_s=self.starting_s,
        )  # fmt: skip
        return diagnose(self.view, evidence, limits)


def finished() -> Run:
    """Every sample of both groups is rolled out."""
    return Run().issue(10, 11).roll_out(10, 0, 1).roll_out(11, 0, 1)


def told(found: Blocked) -> tuple[str, tuple[str, ...]]:
    assert found.is_overdue
    return found.hop, found.workers


def test_prompts_that_issue_too_little() -> None:
    """The role says itself why it issues nothing."""
    run = Run().issue(10).says("prompts", "waiting", "control, which says paused")
    found = run.blocked()
    assert ("prompts", ("prompts-0",)) == told(found)
    assert "1 whole groups are open, a step needs 2; the last one is 10" in (found.sentence)
    assert "prompts-0 says 'waiting control, which says paused', no progress for 60 s" in (
        found.sentence
    )


def test_a_torn_group_is_the_fault_of_prompts() -> None:
    """A group that misses a sample can never be complete."""
    found = Run().issue(10).issue(11, size=1).blocked()
    assert ("prompts", ("prompts-0",)) == told(found)
    assert "group 11 has 1 of 2 samples" in found.sentence


def test_a_rollout_worker_that_is_silent() -> None:
    """The group, its sample, where its prompt lies, and how long the worker has been silent."""
    run = Run().issue(10, 11).roll_out(10, 0, 1).roll_out(11, 0)
    assert run.committed is not None
    run.committed["rollout"][Partition("prompts", 1)] = Committed(offset=3)
    found = run.says("rollout", "working", until_ms=NOW_MS + 1000).blocked()
    assert ("rollout", ("rollout-0",)) == told(found)
    assert found.sentence == (
        "no report from rollout-0 for 59 s (last reported: working); 1 trajectory of group 11 is "
        "missing: 11/1 at prompts[1]@3, issued 60 s ago"
    )


def test_a_worker_that_works_has_until_its_own_deadline() -> None:
    """A long sample is no stall as long as the deadline of samples allows it."""
    run = Run().issue(10, 11).says("rollout", "working")
    patient = run.blocked(replace(LIMITS, sample_s=90.0))
    assert ("rollout", False) == (patient.hop, patient.is_overdue)
    assert ("rollout", ("rollout-0",)) == told(run.blocked(replace(LIMITS, sample_s=40.0)))


def test_a_worker_without_its_device_has_until_all_others_had_it() -> None:
    run = Run().issue(10, 11).says("rollout", "offloaded")
    patient = run.blocked(replace(LIMITS, start_s=0.0, shifts_s=40.0))
    assert ("rollout", False) == (patient.hop, patient.is_overdue)
    late = run.blocked(replace(LIMITS, start_s=0.0, shifts_s=20.0))
    assert ("rollout", ("rollout-0",)) == told(late)


def test_one_of_two_rollout_workers() -> None:
    """The silent one is named first; while the other one finishes samples, nothing is blocked."""
    run = Run().issue(10, 11).says("rollout", "working", until_ms=NOW_MS)
    other = {"worker": "rollout-1", "role": "rollout", "instance": "r9", "state": "waiting",
             "detail": "for prompts"}  # fmt: skip
    run.take(worker_report(**other, at_ms=NOW_MS), worker_report(**other, at_ms=STALLED_MS))
    assert ("rollout", ("rollout-0", "rollout-1")) == told(run.blocked())
    run.take(worker_report(**other, at_ms=STALLED_MS, counters={"samples": 1.0}))
    assert run.look() is None


def test_trajectories_that_nobody_scores() -> None:
    """Exactly those that the group's position and done set leave out, and who rolled them out."""
    run = finished().score_below(101).says("logprob", "working", until_ms=NOW_MS + 1000)
    found = run.blocked()
    assert ("logprob", ("logprob-0",)) == told(found)
    assert found.sentence == (
        "no report from logprob-0 for 59 s (last reported: working); "
        "3 trajectories of groups 10, 11 are unscored: 10/1 at trajectories[0]@101, "
        "finished 60 s ago by rollout-0, and 2 more"
    )


def test_a_logprob_worker_without_a_process() -> None:
    """What the supervisor knows wins over the last report."""
    run = finished()
    run.gone = frozenset({"logprob-0"})
    found = run.blocked()
    assert ("logprob", ("logprob-0",)) == told(found)
    assert "logprob-0 is not running" in found.sentence
    assert ("logprob", ("logprob-0",)) == told(run.blocked(replace(LIMITS, stall_s=90.0)))


def test_a_trainer_that_has_everything() -> None:
    """All is scored: what it says, and that the step is due."""
    run = finished().score_below(112)
    found = run.blocked()
    assert ("trainer", ("trainer-0",)) == told(found)
    assert found.sentence == (
        "trainer-0 says 'waiting for 2 complete groups; 1 are begun', no progress for 60 s; "
        "step 4 has not run, although every sample of 2 open groups (10, 11) is scored or "
        "dead-lettered"
    )


def test_a_trainer_that_saves_has_longer() -> None:
    """A large checkpoint is no step that hangs, until its own deadline."""
    run = finished().score_below(112).says("trainer", "saving", "a checkpoint of step 3")
    assert ("trainer", ("trainer-0",)) == told(run.blocked())
    found = run.blocked(replace(LIMITS, save_s=90.0))
    assert (found.hop, found.is_overdue) == ("trainer", False)


def test_a_checkpoint_is_counted_from_its_own_begin() -> None:
    """What the trainer had waited before, in a pause perhaps, is none of its time."""
    run = finished().score_below(112).says("trainer", "saving", "a checkpoint of step 3")
    run.take(worker_report(worker="trainer-0", role="trainer", instance="i", state="waiting",
                           at_ms=NOW_MS - 3_600_000))  # fmt: skip
    found = run.blocked(replace(LIMITS, save_s=90.0))
    assert (found.hop, found.is_overdue) == ("trainer", False)


def at_the_end(state: str, detail: str = "", until_ms: int = STALLED_MS) -> Run:
    """The last step is done; prompts has ended, the others have nothing to do."""
    run = (
        Run()
        .take(trainer_started(epoch=2, step_target=3))
        .says("prompts", "stopped", until_ms=NOW_MS)
    )
    return run.says("trainer", state, detail, until_ms)


def test_after_the_last_step_only_the_trainer_is_waited_for() -> None:
    """Until the deadline of its checkpoint; who is idle then, or has ended, blocks nobody."""
    limits = replace(LIMITS, save_s=90.0)
    found = at_the_end("saving", "a checkpoint of step 3").blocked(limits)
    assert (("trainer-0",), False) == (found.workers, found.is_overdue)
    assert found.sentence == (
        "trainer-0 says 'saving a checkpoint of step 3', no progress for 60 s; "
        "all 3 steps are done, and it has not ended"
    )
    late = at_the_end("saving").blocked(replace(limits, save_s=40.0))
    silent = at_the_end("saving", until_ms=NOW_MS + 1000).blocked(limits)
    assert [("trainer", ("trainer-0",))] * 2 == [told(late), told(silent)]


def test_after_the_last_step_the_trainer_serves_pulls() -> None:
    """As long as a pull may take; once it has said that it stops, nothing is waited for."""
    patient, hasty = replace(LIMITS, pull_s=90.0), replace(LIMITS, pull_s=40.0)
    found = at_the_end("waiting", "until workers have the last version").blocked(patient)
    assert (("trainer-0",), False) == (found.workers, found.is_overdue)
    assert ("trainer", ("trainer-0",)) == told(at_the_end("waiting").blocked(hasty))
    assert at_the_end("stopped").look(hasty) is None


def test_a_dead_sample_is_waited_for_by_nobody() -> None:
    """A dead letter ends its sample at the hop that wrote it."""
    run = Run().issue(10, 11).roll_out(10, 0, 1).roll_out(11, 0).score_below(112)
    run.take(dead_letter(group_id="11", sample=1))
    assert ("trainer", ("trainer-0",)) == told(run.blocked())


@pytest.mark.parametrize("role", ["rollout", "logprob"])
def test_a_pull_that_is_never_answered(role: str) -> None:
    """The version, since when it was asked for, and who should have sent it."""
    run = Run().issue(10, 11) if role == "rollout" else finished()
    run.take(worker_report(worker=f"{role}-0", role=role, instance="r1" if role == "rollout" else
                           "i", at_ms=NOW_MS, policy_version=3))  # fmt: skip
    run.take(pull_requested(4, worker=f"{role}-0", role=role, instance="i"))
    found = run.says(role, "pulling", "policy version 4").blocked()
    assert ("weights", (f"{role}-0", "trainer-0")) == told(found)
    assert "asked for policy version 4 60 s ago and has not loaded it" in found.sentence
    assert "it is served by trainer-0" in found.sentence
    run.take(policy_loaded(4, worker=f"{role}-0"))
    assert (role, (f"{role}-0",)) == told(run.blocked())


def test_a_version_that_was_made_and_not_published() -> None:
    """Workers wait for it; the trainer is the culprit."""
    run = Run().issue(10, 11).take(step_completed(4, closed=ClosedGroups(watermark=10)))
    found = run.says("trainer", "working", until_ms=NOW_MS).blocked()
    assert ("weights", ("trainer-0",)) == told(found)
    assert found.sentence.startswith("no report from trainer-0 for 60 s")
    assert found.sentence.endswith("policy version 4 was made but not published")


def test_a_broker_that_delivers_nothing() -> None:
    """Everybody silent at once is not everybody's fault."""
    run = Run().issue(10, 11)
    for role in ROLES:
        run.last_report_ms[role] = NOW_MS + 1000
    found = run.blocked()
    assert ("broker", ()) == told(found)
    assert "no worker has reported for 59 s" in found.sentence


def test_a_run_that_nobody_claimed() -> None:
    """Loading a large model is no stall until it has lasted too long."""
    view = Folds()
    evidence = StallFacts(now_ms=STALLED_MS, waited_s=60.0)
    found = diagnose(view, evidence, LIMITS)
    assert found is not None
    assert ("trainer", False) == (found.hop, found.is_overdue)
    late = diagnose(view, replace(evidence, waited_s=START_S), LIMITS)
    assert late is not None
    assert late.is_overdue
    assert "no trainer worker has ever reported; the trainer has not claimed the run" == (
        late.sentence
    )


@pytest.mark.parametrize("role", ROLES)
def test_a_worker_that_was_restarted_may_load_as_long_as_at_first(role: str) -> None:
    """What its predecessor said last, and that it is silent since, says nothing about it."""
    late = at_the_end("saving") if role == "trainer" else finished()
    run = {"prompts": Run(), "rollout": Run().issue(10, 11), "logprob": finished()}.get(role, late)
    run.says(role, "stopped", until_ms=NOW_MS + 1000)
    run.starting_s = {f"{role}-0": 55.0}
    found = run.blocked()
    assert (role, False) == (found.hop, found.is_overdue)
    assert f"{role}-0 was started 55 s ago and has not reported yet" in found.sentence
    run.starting_s = {f"{role}-0": START_S}
    assert (role, (f"{role}-0",)) == told(run.blocked())


def test_silence_of_those_that_are_started_is_not_the_broker() -> None:
    """As after `--resume`, when the log has the reports of the processes before."""
    run = Run().issue(10, 11)
    for role in ROLES:
        run.says(role, "waiting", until_ms=NOW_MS)
    run.starting_s = {f"{role}-0": 55.0 for role in ROLES}
    found = run.blocked()
    assert ("rollout", False) == (found.hop, found.is_overdue)


def test_without_the_groups_positions() -> None:
    """A broker that does not say where logprob is: a trainer that waits puts it under suspicion."""
    waiting, working = finished(), finished().says("trainer", "working", until_ms=NOW_MS)
    waiting.committed = working.committed = None
    assert ("logprob", ("logprob-0",)) == told(waiting.blocked())
    assert ("trainer", ("trainer-0",)) == told(working.blocked())


def test_closed_groups_are_forgotten() -> None:
    """A step and a drop close groups; late prompts of them are passed by."""
    run = Run().issue(10, 11, 12)
    run.take(groups_dropped(closed=ClosedGroups(watermark=11, above=(12,)))).issue(10)
    assert [11, 11] == [sample.group.number for sample in run.view.samples.open]


def test_a_trajectory_read_before_its_prompt() -> None:
    """Topics are read beside each other; the sample is rolled out all the same."""
    run = Run().roll_out(10, 0).issue(10)
    assert [True, False] == [sample.is_rolled_out for sample in run.view.samples]


def test_a_position_that_another_client_moved_ahead_is_named() -> None:
    """Within the log nobody is told: the prompts that it passed over are read by no worker."""
    run = Run().issue(10, 11)
    assert "another client moved it" not in run.blocked().sentence
    assert run.committed is not None
    run.committed["rollout"] = {Partition("prompts", n): Committed(offset=99) for n in range(2)}
    found = run.blocked()
    assert "rollout" == found.hop
    assert "prompts[0]@0, issued" in found.sentence
    assert "position lies behind it: another client moved it" in found.sentence
