"""Health in plain sentences, by clocks that a test sets."""

from __future__ import annotations

import sys

import pytest

from rlstreams.schemas.events import Event
from rlstreams.show.health.app import serve
from rlstreams.show.health.health import SMALL, HealthWatch
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.parts import Message
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import STEPS, Retention
from rlstreams.streams.views.stalls import RESTART_S, START_S
from rlstreams.workers.config.operation import DeadLettersSection, DeadlinesSection
from rlstreams.workers.config.run import (
    PromptsSection,
    RolloutSection,
    RunConfig,
    RunSection,
    TrainerSection,
)
from rlstreams.workers.loop.stall import limits_of
from tests import factories

STALL_S = 30.0
CONFIG = RunConfig(
    deadlines=DeadlinesSection(stall_s=STALL_S),
    dead_letters=DeadLettersSection(max_share=0.5, window_samples=4),
    prompts=PromptsSection(group_size=2),
    rollout=RolloutSection(max_attempts=1),
    trainer=TrainerSection(groups_per_step=1),
)
LIMITS = limits_of(CONFIG)
PATIENCE_S = round(STALL_S + max(LIMITS.sample_s, LIMITS.pull_s, START_S))


class Scene:
    """A watch, its clock, and workers that report once a second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.saying: dict[str, tuple[str, str]] = {
            "prompts-0": ("waiting", "for closed groups"),
            "rollout-0": ("working", ""),
            "logprob-0": ("waiting", "for trajectories"),
            "trainer-0": ("waiting", "for samples"),
        }
        self.counters: dict[str, dict[str, float]] = {}
        self.instances: dict[str, str] = {}
        self.watch = HealthWatch(
            CONFIG, clock_ms=lambda: factories.NOW_MS + round(self.now_s * 1000),
            monotonic_s=lambda: self.now_s,
        )  # fmt: skip
        self.tell(factories.trainer_started(epoch=1, step_target=100))
        self.pass_s(0)

    def tell(self, *events: Event) -> None:
        for event in events:
            self.watch.apply(event)

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds + 1):
            for worker, (state, detail) in self.saying.items():
                self.tell(
                    factories.worker_report(
                        worker=worker,
                        role=worker.partition("-")[0],
                        state=state,
                        detail=detail,
                        counters=dict(self.counters.get(worker, {})),
                        instance=self.instances.get(worker, "a"),
                        at_ms=0,  # a clock that is wrong by half a century
                    )
                )
            self.watch.tick(0)
            self.now_s += 1

    @property
    def problems(self) -> tuple[str, ...]:
        return self.watch.look().problems


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_nothing_is_well_before_the_log_is_read() -> None:
    """What is not known is not called healthy."""
    watch = HealthWatch(CONFIG)
    watch.tick(12)
    assert ("the log has not been read to its end yet: 12 offsets are left",) == (
        watch.look().problems
    )


def test_a_stall_names_the_first_role_that_is_stuck(scene: Scene) -> None:
    """Those that wait for it are not blamed; the next step ends it."""
    scene.saying["rollout-0"] = ("starting", "")
    scene.pass_s(20)
    assert () == scene.problems
    scene.saying["rollout-0"] = ("pulling", "policy version 1")
    scene.pass_s(1000)
    (problem,) = scene.problems
    assert " s (the last was 0): blocked at rollout: rollout-0 says 'pulling policy" in problem

    scene.tell(factories.step_completed(1, epoch=1, policy_version=1))
    scene.pass_s(1)
    assert () == scene.problems


def test_a_stall_of_nobody_tells_what_all_say(scene: Scene) -> None:
    """Each waits for another: the sentence leaves out none."""
    scene.saying["rollout-0"] = ("waiting", "for prompts")
    scene.pass_s(PATIENCE_S - 5)
    assert () == scene.problems
    scene.pass_s(5)
    (problem,) = scene.problems
    assert "no role says that it is stuck" in problem
    assert [True] * 4 == [worker in problem for worker in scene.saying]


def test_a_paused_run_does_not_stall(scene: Scene) -> None:
    """Nor does one that has all its steps."""
    scene.tell(factories.control_state(state="paused"))
    scene.pass_s(100)
    assert ((), "paused") == (scene.problems, scene.watch.look().state)
    scene.tell(factories.control_state(state="paused", reason="wrong weights"))  # the guard
    assert ("paused: wrong weights",) == scene.problems
    scene.tell(factories.control_state(state="running", revision=2))
    scene.tell(factories.step_completed(100, epoch=1, policy_version=100))
    scene.pass_s(100)
    assert ((), "over") == (scene.problems, scene.watch.look().state)


def test_a_checkpoint_has_its_own_time(scene: Scene) -> None:
    """As it has under `up`: `deadlines.checkpoint_s`, and only while its writer is heard."""
    allowed_s = round(CONFIG.deadlines.checkpoint_s)
    scene.saying["rollout-0"] = ("waiting", "for prompts")
    scene.saying["trainer-0"] = ("saving", "a checkpoint of step 1")
    scene.pass_s(allowed_s - 5)
    assert () == scene.problems
    scene.pass_s(round(STALL_S + RESTART_S) + 10)
    (problem,) = scene.problems
    assert "blocked at trainer: trainer-0 says 'saving a checkpoint of step 1'" in problem


def test_a_role_that_was_restarted_has_the_time_that_up_gives_it(scene: Scene) -> None:
    """It starts, then reads what it has to read again; only who does neither is stuck."""
    scene.saying["rollout-0"] = ("waiting", "for prompts")
    scene.saying["trainer-0"] = ("starting", "")
    scene.instances["trainer-0"] = "b"
    scene.pass_s(200)
    assert () == scene.problems
    assert scene.watch.look().since_last_step_s > STALL_S
    scene.saying["trainer-0"] = ("waiting", "for 4 complete groups; 0 are begun")
    for num_records in range(200):
        scene.counters["trainer-0"] = {"fetched_records": float(num_records)}
        scene.pass_s(0)
    assert () == scene.problems
    scene.pass_s(PATIENCE_S)
    (problem,) = scene.problems
    assert "no role says that it is stuck" in problem


def test_the_time_of_its_work_begins_with_the_end_of_a_start(scene: Scene) -> None:
    """Its first window takes as long as every other one."""
    scene.saying |= {"rollout-0": ("waiting", "for prompts"), "logprob-0": ("starting", "")}
    scene.instances["logprob-0"] = "b"
    scene.pass_s(200)
    scene.saying["logprob-0"] = ("working", "")
    scene.pass_s(round(STALL_S) - 5)
    assert () == scene.problems
    scene.pass_s(round(RESTART_S) + 5)
    assert "no step for" in scene.problems[0]


def test_a_start_that_takes_too_long_is_a_stall(scene: Scene) -> None:
    """As under `up`: after `START_S`."""
    scene.saying["logprob-0"] = ("starting", "")
    scene.instances["logprob-0"] = "b"
    scene.saying["rollout-0"] = ("waiting", "for prompts")
    scene.pass_s(round(START_S) - 5)
    assert () == scene.problems
    scene.pass_s(10)
    (problem,) = scene.problems
    assert "blocked at logprob: logprob-0 says 'starting'" in problem


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_a_crash_loop_is_a_stall(scene: Scene, role: str) -> None:
    """Each life starts, counts what is no finished work, and dies; each trainer claims the run."""
    worker, counter = f"{role}-0", {"rollout": "sampled_tokens"}.get(role, "fetched_records")
    scene.saying["rollout-0"] = ("waiting", "for prompts")
    found = []
    for life in range(2, 16):
        scene.instances[worker], scene.counters[worker] = f"{life}", {}
        if role == "trainer":
            scene.tell(factories.trainer_started(epoch=life, step_target=100))
        scene.saying[worker] = ("starting", "")
        scene.pass_s(29)
        found.append(bool(scene.problems))
        scene.saying[worker] = ("waiting", "")
        for count in range(30):
            scene.counters[worker] = {counter: 100.0 * count}
            scene.pass_s(0)
        found.append(bool(scene.problems))
    num_excused = round(PATIENCE_S / 30)
    assert [False] * (num_excused - 1) == found[: num_excused - 1]
    assert [True] * (28 - num_excused) == found[num_excused:]


def test_work_that_brings_no_step_is_a_stall(scene: Scene) -> None:
    """After the time that the longest work has, whatever moves; a step gives that time again."""
    for _ in range(2):
        for number in range(PATIENCE_S + 5):
            if number == PATIENCE_S - 5:
                assert () == scene.problems
            scene.counters["rollout-0"] = {"evaluation_samples": float(number)}
            scene.pass_s(0)
        assert "no role says that it is stuck" in scene.problems[0]
        step = scene.watch.look().step + 1
        scene.tell(factories.step_completed(step, epoch=1, policy_version=step))
        scene.pass_s(0)
        assert () == scene.problems


def test_a_writers_clock_that_is_behind_blames_nobody(scene: Scene) -> None:
    """What was told before the log was read to its end is half a century old, by that clock."""
    scene.pass_s(round(STALL_S) + 20)
    assert () == scene.problems  # rollout-0 works, within the deadline of a sample


def test_a_writers_clock_that_is_ahead_hides_no_silence() -> None:
    """Reports that we date by our clock were older than what lies in the log, and not taken."""
    now_s = [0.0]
    watch = HealthWatch(
        CONFIG,
        clock_ms=lambda: factories.NOW_MS + round(now_s[0] * 1000),
        monotonic_s=lambda: now_s[0],
    )
    watch.apply(factories.trainer_started(epoch=1, step_target=100))
    for _ in range(3):
        watch.apply(factories.worker_report(at_ms=factories.NOW_MS + 3_600_000))
        watch.tick(0)
        now_s[0] += 1
    now_s[0] += 10
    assert ("no report from rollout-0 for 11 s",) == watch.look().problems


def test_a_silent_worker_is_named(scene: Scene) -> None:
    """Whatever its clock said while it spoke; one that said it stops is not missed."""
    del scene.saying["logprob-0"]
    scene.saying["prompts-0"] = ("stopped", "")
    scene.pass_s(10)
    (problem,) = scene.problems
    assert problem.startswith("no report from logprob-0 for ")


def test_silence_of_all_is_told_once(scene: Scene) -> None:
    """It is the broker, or everybody is gone."""
    scene.saying.clear()
    scene.pass_s(10)
    gone = "the broker does not accept or deliver records, or every role is gone"
    (problem,) = scene.problems
    assert gone in problem
    scene.pass_s(round(STALL_S))
    stall, problem = scene.problems
    assert stall.endswith("(the last was 0)")  # no role is blamed for it
    assert gone in problem


def test_too_many_dead_letters_are_a_problem(scene: Scene) -> None:
    """By the share that the configuration allows, as `up` judges it."""
    for group in range(2):
        for sample in range(2):
            scene.tell(factories.dead_letter(group_id=str(group), sample=sample))
    (problem,) = scene.problems
    assert "4 of the last 4 samples were dead-lettered" in problem


def test_what_cannot_be_read_is_counted() -> None:
    """The role that consumes it sets it aside. What is read again counts once: a client without
    committed offsets begins anew when it has to join its group again."""
    watch = HealthWatch(CONFIG)
    for offset in (0, 0, 1):
        watch.take(Message(Partition(STEPS.name, 0), offset, b"", b"no event", {}, 0))
    assert 2 == watch.look().unreadable


def test_topics_with_payloads_are_not_read() -> None:
    """They may have gigabytes, and Faust buffers messages by number."""
    assert not {"prompts", "trajectories", "scored-trajectories"} & {topic.name for topic in SMALL}
    assert Retention.PAYLOAD not in {topic.retention for topic in SMALL}


def test_without_faust_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faust", None)
    config = RunConfig(run=RunSection(id="run"))
    with pytest.raises(ConfigError, match=r"pip install 'rlstreams\[monitor\]'"):
        serve(config, "127.0.0.1:1", {}, {}, host="127.0.0.1", port=0, say=print)


def test_a_run_that_does_not_learn_is_healthy_and_says_why() -> None:
    """No status 503 for it: a restart would cure nothing."""
    scene = Scene()
    samples = tuple(factories.sample_ref(group_id=str(n)) for n in range(16))
    flat = {"reward_std": 0.0, "equal_reward_groups": 1.0}
    for step in (1, 2, 3):
        assert "" == scene.watch.look().learning
        scene.tell(factories.step_completed(step=step, epoch=1, metrics=flat, samples=samples))
    found = scene.watch.look()
    assert found.learning.startswith("nothing can be learnt: in the last 3 steps")
    assert () == found.problems
