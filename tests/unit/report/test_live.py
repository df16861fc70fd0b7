"""The live view: it fits a small terminal, and says the same in plain lines."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from rlstreams.streams.views.dead import DeadReason, DeadState
from rlstreams.streams.views.evaluation import EvaluationState
from rlstreams.streams.views.feed import Views, ViewState
from rlstreams.streams.views.learning import hindrance
from rlstreams.streams.views.run import RunState, StepPoint
from rlstreams.up.live.panels import learning
from rlstreams.up.live.screen import LiveView, PlainLines, Screen
from rlstreams.words.screen import KillMark, LiveInput, ProcessInfo
from tests import factories
from tests.unit.report.sample_run import views_at

WORKERS = ("prompts-0", "rollout-0", "rollout-1", "logprob-0", "trainer-0")


def live_input(num_steps: int = 34, **changes: Any) -> LiveInput:
    values: dict[str, Any] = {
        "run": "demo",
        "views": views_at(num_steps),
        "elapsed_s": 42.0,
        "step_target": 60,
        "processes": [
            ProcessInfo(worker=name, role=name[:-2], pid=1, is_alive=name != "rollout-1")
            for name in WORKERS
        ],
        "kills": [KillMark(step=12, worker="rollout-0")],
        "message": "rollout-1 killed with SIGKILL",
    }
    return LiveInput(**{**values, **changes})


def full_input(**changes: Any) -> LiveInput:
    """One recorded state in which every pane has something to show."""
    views = views_at(34)
    figures = {"kl": 0.0034, "grad_norm": 0.56, "reward/worked": 0.14, "gpu_free_gb": 31.0}
    steps = [
        replace(p, loss=-0.2 - p.step / 500, metrics={**p.metrics, **figures})
        for p in views.run.steps
    ]
    doing = {
        "logprob": ("waiting", "for trajectories"),
        "prompts": ("waiting", "for closed groups"),
    }
    workers = [
        replace(w, state=doing[w.role][0], detail=doing[w.role][1]) if w.role in doing else w
        for w in views.throughput.workers
    ]
    dead = DeadState((DeadReason(reason="verifier", num=3, newest="rollout-0: reward.py:7: oops"),))
    values: dict[str, Any] = {
        "views": replace(
            views,
            run=replace(views.run, steps=tuple(steps)),
            throughput=replace(views.throughput, workers=tuple(workers)),
            dead=dead,
        ),
        "processes": [
            ProcessInfo(worker=name, role=name[:-2], pid=1, is_alive=True,
                        restarts=int(name == "rollout-0"))
            for name in WORKERS
        ],
    }  # fmt: skip
    return live_input(**{**values, **changes})


def drawn(given: LiveInput, width: int = 80, height: int = 24) -> list[str]:
    console = Console(
        record=True, width=width, height=height, force_terminal=True, file=io.StringIO()
    )
    console.print(Screen(given), end="")
    return console.export_text().splitlines()


SMALL = (
    "demo  running",
    "step 34 of 60",
    "0:42, 0:39 left",
    "o held-out 0.86 \u2584 reward 0.82 \u250a kill",
    "rollout-0 +1 working",
    "waiting for",
    "trajectories",
    "closed",
    "groups",
    "loss -0.268  KL 0.0034  entropy 0.105  gradient 0.56  tokens/s",
    "nobody holds the trainer back",
    "v34",
    "lag",
    "1,200",
    "dead letters: verifier 3   rlstreams dead-letters list RUN",
    " Ctrl-C  drain",
)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_a_terminal_is_filled(width: int, height: int) -> None:
    """A small one shows all."""
    lines = drawn(full_input(), width, height)
    assert (height, width) == (len(lines), max(map(len, lines)))
    text = "\n".join(lines)
    assert [] == [words for words in SMALL if words not in text]


@pytest.mark.parametrize(
    ("state", "shown"),
    [("running", "down"), ("saving", "ended"), ("finishing", "ended"), ("draining", "ended")],
)
def test_a_worker_that_is_gone_is_missed_only_while_the_run_goes_on(state: str, shown: str) -> None:
    """At the end of a run each process ends, and nothing is wrong."""
    (row,) = [line for line in drawn(live_input(state=state)) if line.startswith("│ rollout-1")]
    assert shown == row.split()[2]


def test_a_narrow_terminal_shows_who_does_what() -> None:
    """At 40 columns names and states are whole; what had no room is left out."""
    text = "\n".join(drawn(live_input(), 40, 24))
    for word in (*WORKERS, "working", "down", "held-out"):
        assert word in text
    assert "lag" not in text


def test_an_empty_run_has_a_screen_too() -> None:
    given = live_input(views=ViewState(), processes=(), kills=(), message="")
    text = "\n".join(drawn(given))
    assert "step 0 of 60" in text
    assert "o held-out -" in text


@pytest.mark.parametrize(("is_terminal", "term"), [(False, "xterm"), (True, "dumb")])
def test_where_nothing_can_be_drawn_there_is_a_line_for_each_step(
    *, is_terminal: bool, term: str
) -> None:
    """Each step once, each message once, as they come."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=80, _environ={"TERM": term})
    with LiveView(console) as view:
        view.update(live_input(num_steps=0, message=""))
        view.update(live_input(num_steps=2, message=""))
        view.update(live_input(num_steps=3))
        view.update(live_input(num_steps=3))
        lines = out.getvalue().splitlines()
    assert lines[0] == "before training: held-out accuracy 0.422, over 64 answers"
    assert [line.split()[:2] for line in lines[1:]] == [
        ["step", "1/60"],
        ["step", "2/60"],
        ["[0:42]", "rollout-1"],
        ["step", "3/60"],
    ]
    assert "held-out 0.422 (v0)" in lines[1]


def test_a_long_wait_says_what_it_waits_for() -> None:
    """Every thirty seconds without a line, in plain lines and in the log file; nothing before."""
    lines = PlainLines()
    quiet = live_input(views=ViewState(), message="", elapsed_s=29.0)
    assert [] == list(lines.new(quiet))
    (said,) = lines.new(replace(quiet, elapsed_s=31.0))
    assert said.startswith("[0:31] step 0/60, 31 s without news: logprob-0 starting; ")
    assert "rollout-1 down" in said
    assert [] == list(lines.new(replace(quiet, elapsed_s=60.0)))
    (again,) = lines.new(replace(full_input(), elapsed_s=62.0, views=waiting(), message=""))
    assert "logprob-0 waiting for trajectories" in again
    assert "rollout-0" not in again, "what works is not waited for"


def waiting() -> ViewState:
    """As in `full_input`, before the first step."""
    return replace(full_input().views, run=RunState(), evaluation=EvaluationState())


def of_sixteen(point: StepPoint, reward: float, **metrics: float) -> StepPoint:
    """The step, of 16 groups with this reward."""
    metrics = {**point.metrics, **metrics}
    return replace(point, reward=reward, num_groups=16, metrics=metrics)


def test_rewards_without_a_signal_are_said_once() -> None:
    """After three steps whose answers all earned the same; again only when it had ended."""
    flat = {"reward_std": 0.0, "equal_reward_groups": 1.0}
    views = views_at(5)
    steps = [
        replace(p, reward=0.0, num_groups=16, metrics={**p.metrics, **flat})
        for p in views.run.steps
    ]

    def said(upto: int) -> list[str]:
        run = replace(views.run, steps=tuple(steps[:upto]))
        given = live_input(views=replace(views, run=run), message="")
        return [line for line in lines.new(given) if line.startswith("nothing can be learnt")]

    def why(of: list[StepPoint]) -> str:
        return str(hindrance(replace(views, run=replace(views.run, steps=tuple(of)))))

    lines = PlainLines()
    assert [] == said(2)
    (told,) = said(3)
    assert "in the last 3 steps every answer was rewarded with 0" in told
    assert "rollout.max_new_tokens), or are the rows too hard? read some: rlstreams ins" in told
    assert "rlstreams inspect --step 3 RUN" in told
    assert "too hard" not in why([replace(step, reward=1.0) for step in steps])
    assert [] == said(5)
    apart = [
        replace(steps[0], reward=n / 2, metrics={**flat, "reward_std": 0.5}) for n in (0, 1, 2)
    ]
    assert "to the same prompt were rewarded alike" in why(apart)
    mixed = [
        *apart[:2],
        replace(apart[2], metrics={**flat, "reward_std": 1, "equal_reward_groups": 0.9}),
    ]
    assert "None" == why(mixed)


def test_what_keeps_a_run_from_learning_is_read_whole() -> None:
    """In four rows of 80 columns; a row that has no room is said to be missing."""
    flat = {"reward_std": 0.0, "equal_reward_groups": 1.0}
    views = views_at(5)
    steps = tuple(
        replace(p, reward=0.0, num_groups=16, metrics={**p.metrics, **flat})
        for p in views.run.steps
    )
    given = live_input(views=replace(views, run=replace(views.run, steps=steps)), message="")
    rows = drawn(given)
    assert 24 == len(rows)
    shown = " ".join(row.strip() for row in rows)
    assert str(hindrance(given.views)) in shown
    assert "Ctrl-C" in rows[-1]
    killed = drawn(replace(given, message="rollout-1 killed with SIGKILL"))
    assert "killed with SIGKILL" in killed[-6]
    assert "nothing can be learnt: in the last 3 steps" in killed[-5]
    assert drawn(given, width=40)[-3].rstrip().endswith("\u2026")


def test_rewards_that_are_not_right_or_wrong_are_no_accuracy() -> None:
    """One held-out answer that earned 0.5 is enough."""
    fold = Views()
    for reward, measure in ((1.0, "accuracy"), (0.5, "reward")):
        fold.apply(
            factories.trajectory(
                group_id=f"e0-{int(reward)}", sample=0, purpose="evaluate", reward=reward
            )
        )
        assert measure == fold.evaluation.measure


def test_a_message_is_shown_as_it_is() -> None:
    """No markup, no picture for a name between colons, nothing that steers the terminal."""
    given = live_input(num_steps=0, message="rollout-0: [/INST] :x: \x1b[2J")
    shown = "rollout-0: [/INST] :x: \\x1b[2J"
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=False, width=80)) as view:
        view.update(given)
    assert f"[0:42] {shown}" == out.getvalue().splitlines()[0]
    assert shown in "\n".join(drawn(given))


def test_what_happened_stays_when_the_screen_goes() -> None:
    """The alternate screen is left; then come how far it got, the curve and each message."""
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"}
    )
    with LiveView(console) as view:
        assert "its roles begin" in out.getvalue(), "an empty screen while topics are read"
        view.update(live_input(message="rollout-0 killed"))
        view.update(live_input(message="rollout-0 is back"))
    screen, _, left = out.getvalue().partition("\x1b[?25h\x1b[?1049l")
    assert screen.startswith("\x1b[?1049h")
    assert "held-out" in left
    assert "step  33" not in left, "a line for each step would be all that is left to scroll"
    assert ["[0:42] rollout-0 killed", "[0:42] rollout-0 is back"] == [
        line for line in left.splitlines() if line.startswith("[0:42]")
    ]


def test_rewards_of_any_size_have_room() -> None:
    """A function of a user's may give more than 1, less than 0, and for once no number at all."""
    views = views_at(3)
    given = (-2.0, math.nan, 12.0)
    steps = [replace(p, reward=r) for p, r in zip(views.run.steps, given, strict=True)]
    views = replace(views, run=replace(views.run, steps=tuple(steps)))
    console = Console(width=40, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(learning(live_input(views=views, kills=()), 40, 7))
    lines = captured.get().splitlines()
    assert ["12", "5", "-2"] == [lines[row].split()[0] for row in (0, 2, 4)]
    assert lines[0][7:].strip(), "the highest reward is at the top"
    assert lines[4][7:].strip(), "the lowest is at the bottom"


def unevaluated(num_steps: int) -> ViewState:
    """The held-out rows are still being answered."""
    return replace(views_at(num_steps), evaluation=EvaluationState())


def test_a_run_that_goes_on_tells_only_of_what_is_new() -> None:
    """Each step that an earlier start has told of would be a line again, hundreds of them."""
    lines = PlainLines()
    lines.skip_to(views_at(32))
    told = [line.split()[:2] for line in lines.new(live_input(num_steps=34, message=""))]
    assert [["step", "33/60"], ["step", "34/60"]] == told


@pytest.mark.parametrize("is_resumed", [False, True])
def test_how_good_it_was_before_training_is_told_once_known(is_resumed: bool) -> None:
    """Also where the first steps were quicker than the last answer."""
    lines = PlainLines()
    lines.skip_to(unevaluated(2) if is_resumed else ViewState())
    first = list(lines.new(live_input(views=unevaluated(2), message="")))
    assert [] == [line for line in first if "before training" in line]
    told = ["before training: held-out accuracy 0.422, over 64 answers"]
    assert told == list(lines.new(live_input(num_steps=2, message="")))
    assert [] == list(lines.new(live_input(num_steps=2, message="")))
