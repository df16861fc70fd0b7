"""Recorded sessions judged again: new outcomes, and how rewards and advantages would change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.debug.rejudge.rejudge import Grader, Rejudged, rejudge
from rlstreams.schemas.events import (
    ClosedGroups,
    Event,
    PartitionPosition,
    Segment,
    StepCompleted,
    Trajectory,
)
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import (
    CALLS,
    OUTCOMES,
    PROMPTS,
    STEPS,
    TRAJECTORIES,
    Topic,
)
from rlstreams.streams.run.run_log import BusLog
from rlstreams.streams.sessions.chain import main_chain, segments_of
from rlstreams.workers.config.load import load, resolved_json
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.reward import RewardSection
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, RewardError, Verifier
from rlstreams.workers.trainer.learn.advantage import advantages_by, permuted
from tests.call_events import (
    answered,
    call_committed,
    outcome_reported,
    session_closed,
    session_opened,
)
from tests.factories import (
    policy_segment,
    prompt,
    prompt_segment,
    sample_ref,
    step_completed,
    trainer_started,
    trajectory,
)
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.random_sessions import ids
from tests.unit.sessions.test_fold import folded
from tests.unit.streams.test_later_topics import recorded

SIZE = 4
DEMO = Path(__file__).parents[3] / "infra/examples/demo.toml"
DIGITS = [10, 11, 12, 13]  # words of the demo's tokenizer
BY = TrainerSection()


def session(number: int, *, kind: str = "ended") -> list[Event]:
    """Two calls; the second one says as many tokens as the sample's number plus 1."""
    of = {"session_id": f"7/{number}", "group_id": "7"}
    return [
        session_opened(sample=number, **of),
        call_committed(call_id="a", request_hash="a", **of),
        call_committed(
            call_id="b", request_hash="b", parent="a", ordinal=1, prompt_tokens=9, new_ids=ids([1]),
            segments=(answered(number + 1, start=200),), **of,
        ),
        session_closed(sample=number, kind=kind, **of),
    ]  # fmt: skip


def sample_of(number: int, reward: float) -> Trajectory:
    chain = main_chain(folded(*session(number)))
    segments = segments_of(chain)
    return trajectory(sample=number, reward=reward, segments=segments, routed_experts=None)


def step(rewards: Sequence[float], learnt: Sequence[float] = (), number: int = 1) -> StepCompleted:
    """Its advantages are of `learnt`, else of its own rewards."""
    advantages = advantages_by(learnt or rewards, ["7"] * SIZE, BY.loss).tolist()
    refs = [
        sample_ref(sample=n, reward=r, advantage=a)
        for n, (r, a) in enumerate(zip(rewards, advantages, strict=True))
    ]
    at = PartitionPosition(topic="scored-trajectories", partition=0, offset=0)
    return step_completed(
        number, samples=tuple(refs), masked=(), absent=(), closed=ClosedGroups(watermark=1),
        positions=(at,),
    )  # fmt: skip


def bus_of(rewards: Sequence[float], *extra: tuple[Topic, Event]) -> MemoryBus:
    """A run of one group whose samples were sessions, and one step with these rewards."""
    bus = MemoryBus(made_log("r"), "r")
    told: list[tuple[Topic, Event]] = [(STEPS, trainer_started()), (STEPS, step(rewards))]
    for number, reward in enumerate(rewards):
        told.append((PROMPTS, prompt(sample=number, group_size=SIZE, text=f"question {number}")))
        told += [(CALLS, event) for event in session(number)]
        said = outcome_reported(session_id=f"7/{number}", outcome_id=f"o{number}", reward=reward)
        told += [(OUTCOMES, said), (TRAJECTORIES, sample_of(number, reward))]
    bus.producer("w").commit([outgoing(topic, event) for topic, event in (*told, *extra)])
    return bus


def numbers(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def by_length(seen: list[AnswerToJudge]) -> Verifier:
    """A grader that pays for each token of the last answer, and fails on those of two."""

    async def judge(sample: AnswerToJudge) -> Judgement:
        seen.append(sample)
        if len(sample.token_ids) == 2:
            raise RewardError("no opinion on two tokens")
        return Judgement(reward=float(len(sample.token_ids)), parts={"length": 1.0}, note="counted")

    return Verifier(judge, require_stop=False)


def judged(bus: MemoryBus, seen: list[AnswerToJudge] | None = None) -> Rejudged:
    grader = Grader(name="length", hash="h1", verifier=by_length([] if seen is None else seen))
    with BusLog(bus, "r") as log:
        return rejudge(log, grader, numbers, BY)


def test_rewards_and_advantages_as_they_would_have_been() -> None:
    seen: list[AnswerToJudge] = []
    found = judged(bus_of([1.0, 0.0, 0.0, 1.0]), seen)
    assert [s.completion for s in seen] == ["200", "200 201", "200 201 202", "200 201 202 203"]
    assert [s.prompt for s in seen] == [f"question {n}" for n in range(SIZE)]
    assert [len(s.transcript) for s in seen] == [2] * SIZE
    rewards = [(o.sample[1], o.was, o.event.kind, o.event.reward) for o in found.outcomes]
    assert rewards == [
        (0, 1.0, "reward", 1.0),
        (1, 0.0, "grader", 0.0),
        (2, 0.0, "reward", 3.0),
        (3, 1.0, "reward", 4.0),
    ]
    assert found.num_changed == 2
    (changed,) = found.steps
    assert changed.is_exact
    # A grader that fails leaves the recorded reward: it is no 0.
    expected = advantages_by([1.0, 0.0, 3.0, 4.0], ["7"] * SIZE, BY.loss).tolist()
    assert (list(changed.now), changed.num_changed) == (expected, SIZE)


def test_new_outcomes_replace_the_old_and_name_who_judged_what() -> None:
    first, second = judged(bus_of([1.0] * SIZE)), judged(bus_of([1.0] * SIZE))
    event = first.outcomes[0].event
    assert (event.supersedes, event.call_id, event.grader) == ("o0", "b", "length")
    assert (event.grader_hash, event.note, event.parts) == ("h1", "counted", {"length": 1.0})
    assert [o.event.outcome_id for o in first.outcomes] == [
        o.event.outcome_id for o in second.outcomes
    ]
    assert len({o.event.outcome_id for o in first.outcomes}) == SIZE


def test_a_step_with_another_way_to_its_advantages_says_so() -> None:
    bus = bus_of([1.0, 0.0, 0.0, 1.0])
    with BusLog(bus, "r") as log:
        other = TrainerSection(loss=LossSection(advantage="rloo"))
        grader = Grader(name="length", hash="", verifier=by_length([]))
        (changed,) = rejudge(log, grader, numbers, other).steps
    assert not changed.is_exact


def test_failed_and_open_sessions_are_not_judged() -> None:
    of = {"session_id": "8/0", "group_id": "8"}
    more = [(CALLS, event) for event in session(9, kind="infrastructure")]
    opened = (CALLS, session_opened(sample=0, **of))
    found = judged(bus_of([1.0] * SIZE, *more, opened))
    assert (len(found.outcomes), found.num_unjudged, found.num_open) == (SIZE, 1, 1)


def test_an_answer_without_its_question_is_not_judged() -> None:
    found = judged(bus_of([1.0] * SIZE, *[(CALLS, event) for event in session(5)]))
    assert (found.outcomes[-1].event.kind, found.outcomes[-1].was) == ("grader", None)
    assert found.outcomes[-1].event.note == "the prompt of 7/5 is not in the log"


def test_equal_rewards_change_no_step() -> None:
    assert judged(bus_of([1.0, 2.0, 3.0, 4.0])).steps == []


def plain_bus(rewards: Sequence[float], learnt: Sequence[float] = (), number: int = 1) -> MemoryBus:
    """A run without agents: one group, one step; sample n answers with the words `n` to 3."""
    bus = MemoryBus(made_log("r"), "r")
    told: list[tuple[Topic, Event]] = [(STEPS, trainer_started(config=resolved_json(load([DEMO]))))]
    told += [(STEPS, step(rewards, learnt, number))] if rewards else []
    for index, reward in enumerate(rewards):
        asked = prompt(sample=index, group_size=SIZE, text="?", answer="33")
        told.append((PROMPTS, asked))
        said = [policy_segment(1, token_ids=ids(DIGITS[index:2]), finish_reason="policy_changed"),
                policy_segment(1, token_ids=ids(DIGITS[2:4]))]  # fmt: skip
        heard = Segment(author="environment", token_ids=ids(DIGITS[:1]))
        segments = (prompt_segment(), policy_segment(1, token_ids=ids([9])), heard, *said)
        told.append(
            (TRAJECTORIES, trajectory(sample=index, reward=reward, segments=segments,
                                      routed_experts=None))
        )  # fmt: skip
    bus.producer("w").commit([outgoing(topic, event) for topic, event in told])
    return bus


def test_samples_without_an_agent_are_judged_by_their_last_turn() -> None:
    """As a rollout worker gives them: all that one turn said, under whichever versions."""
    seen: list[AnswerToJudge] = []
    found = judged(plain_bus([1.0, 0.0, 0.0, 1.0]), seen)
    assert seen[0].completion == numbers(DIGITS)
    assert seen[0].finish_reason == "stop"
    assert [(said["author"], said["text"]) for said in seen[0].transcript] == [
        ("policy", "9"), ("environment", numbers(DIGITS[:1])), ("policy", numbers(DIGITS)),
    ]  # fmt: skip
    changed = [(o.sample[1], o.was, o.event.kind, o.event.reward) for o in found.outcomes]
    assert changed == [
        (0, 1.0, "reward", 4.0),
        (1, 0.0, "reward", 3.0),
        (2, 0.0, "grader", 0.0),
        (3, 1.0, "grader", 0.0),
    ]
    assert (found.num_steps, found.num_exact, found.num_failed) == (1, 1, 2)
    (again,) = found.steps
    assert list(again.now) == advantages_by([4.0, 3.0, 0.0, 1.0], ["7"] * SIZE, BY.loss).tolist()


def test_a_control_run_permutes_its_rewards_here_too() -> None:
    """As its trainer did, which counts the steps before; taken for another run it is not exact."""
    rewards = [1.0, 2.0, 3.0, 4.0]
    learnt = permuted(rewards, 2)
    assert learnt != rewards
    grader = Grader(name="length", hash="", verifier=by_length([]))
    with BusLog(plain_bus(rewards, learnt, 3), "r") as log:
        assert rejudge(log, grader, numbers, TrainerSection(control="permuted")).num_exact == 1
        assert rejudge(log, grader, numbers, BY).num_exact == 0


GRADERS = """
def half(prompt, completion, answer, metadata):
    return 0.5 if completion else 0.0

def none(prompt, completion, answer, metadata):
    raise ValueError("no idea")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording of such a run, and graders beside it."""
    recorded(plain_bus([0.5, 0.0, 0.0, 0.5]), tmp_path).close()
    (tmp_path / "mine.py").write_text(GRADERS)
    return tmp_path


def replayed(folder: Path, *words: str) -> int:
    tokenizer = str(DEMO.with_name("demo") / "model")
    return main(["replay", "judge", str(folder / "rec"), "--tokenizer", tokenizer, *words])


def test_the_command_shows_what_would_change(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replayed(folder, "--reward", f"{folder}/mine.py:half") == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in told[2:4]] == [["7/1", "0", "0.5"], ["7/2", "0", "0.5"]]
    assert "4 samples judged, mean reward 0.25, now 0.5; 2 changed; 0 without a reward" in told
    assert "         1                          4 of 4" in "\n".join(told)
    assert told[-1].startswith("1 of 1 step: the recorded advantages come out")
    assert replayed(folder, "--reward", f"{folder}/mine.py:none", "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["failed"], said["changed"], said["steps_exact"]) == (4, 0, 1)
    assert "mine.py:6: none raised ValueError: no idea" in said["samples"][0]["note"]
    assert said["samples"][0]["now"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--reward", "gone.py:f"], "gone.py"),
        (["--reward", "mine.py"], "--reward must be FILE.py:NAME, got 'mine.py'"),
        (["--reward", "a.py:f", "--verifier", "exact"], "name one of them"),
        (["--verifier", "exactly"], "did you mean 'exact'?"),
        (["--verifier", "agent"], "name who judges"),
        (["--option", "a=1"], "of whom?"),
        (["--verifier", "numeric", "--option", "tolerence=1"], "has no option 'tolerence'"),
    ],
)
def test_a_grader_that_cannot_be_had_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert replayed(folder, *words) == 78
    assert told in capsys.readouterr().err


def test_a_run_without_samples_has_nothing_to_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(plain_bus([]), tmp_path).close()
    assert replayed(tmp_path, "--verifier", "exact") == 78
    assert "has no finished sample" in capsys.readouterr().err


def test_a_recording_and_a_verifier_of_the_configuration(tmp_path: Path) -> None:
    """Without a broker, by `[reward]` as another run has it."""
    bus = bus_of([1.0, 0.0, 0.0, 1.0])
    section = RewardSection(verifier="exact", require_stop=False)
    with recorded(bus, tmp_path) as log, make_verifier(section) as verifier:
        grader = Grader(name="exact", hash="", verifier=verifier)
        found = rejudge(log, grader, numbers, BY)
    assert [o.event.kind for o in found.outcomes] == ["reward"] * SIZE
    assert {o.event.reward for o in found.outcomes} == {0.0}
    assert found.steps[0].now == pytest.approx([0.0] * SIZE)


def test_an_advantage_of_the_user_s_own_is_asked_again(tmp_path: Path) -> None:
    """By the code of the step's claim, with the new rewards and parts; the files may be gone."""
    text = "def own(samples, most):\n"
    text += "    return [min(s.reward, most) + s.parts.get('length', 0.0) for s in samples]\n"
    name = f"{tmp_path / 'gone.py'}:own"
    by = TrainerSection(loss=LossSection(advantage=name, advantage_options={"most": 3.5}))
    claim = trainer_started(code={"trainer.loss.advantage: gone.py": text})
    bus = MemoryBus(made_log("r"), "r")
    refs = tuple(sample_ref(sample=n, reward=1.0, advantage=1.0) for n in range(SIZE))
    begun: list[tuple[Topic, Event]] = [(STEPS, claim)]
    begun.append((STEPS, replace(step([1.0] * SIZE), samples=refs)))
    for number in range(SIZE):
        begun.append((PROMPTS, prompt(sample=number, group_size=SIZE)))
        begun += [(CALLS, event) for event in session(number)]
        sample = replace(sample_of(number, 1.0), reward_parts={})
        begun.append((TRAJECTORIES, sample))
    bus.producer("w").commit([outgoing(topic, event) for topic, event in begun])
    grader = Grader(name="length", hash="h1", verifier=by_length([]))
    with BusLog(bus, "r") as log:
        found = rejudge(log, grader, numbers, by)
    (changed,) = found.steps
    assert (found.num_exact, changed.now) == (1, (2.0, 1.0, 4.0, 4.5))
