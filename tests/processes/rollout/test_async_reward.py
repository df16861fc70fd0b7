"""An `async def` reward: many judgements wait at a time in one process, and each ends alone."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from rlstreams.workers.config.reward import RewardSection
from rlstreams.workers.rollout import verifier_child
from rlstreams.workers.rollout.make_verifier import make_verifier
from rlstreams.workers.rollout.reward import Judgement, RewardError, Verifier

TOGETHER = 16

# Line numbers are told in messages, so they are fixed: `hang` waits on line 15.
CODE = """\
import asyncio
import time

waiting = []


async def grade(prompt, completion, answer, metadata):
    if completion == "meet":  # let go when all are there
        waiting.append(asyncio.Event())
        if len(waiting) == int(answer):
            for event in waiting:
                event.set()
        await waiting[-1].wait() if len(waiting) == int(answer) else await waiting[0].wait()
    elif completion == "hang":
        await asyncio.sleep(3600)
    elif completion == "block":
        time.sleep(3600)
    elif completion == "die":
        raise SystemExit(3)
    elif completion == "raise":
        raise ValueError("no")
    return float(len(completion))
"""


def verifier(folder: Path, timeout_s: float = 60.0) -> Verifier:
    file = folder / "grade.py"
    file.write_text(CODE)
    return make_verifier(
        RewardSection(
            verifier=f"{file}:grade", timeout_s=timeout_s, processes=1, concurrency=TOGETHER
        )
    )


def ask(one: Verifier, completion: str, answer: str = "") -> Judgement:
    return one.judge("?", completion, answer, {}, "stop")


def test_judgements_wait_side_by_side_in_one_process(tmp_path: Path) -> None:
    """Each waits until all are there: one after the other, none would ever end."""
    with verifier(tmp_path) as one, ThreadPoolExecutor(TOGETHER) as threads:
        asked = [threads.submit(ask, one, "meet", str(TOGETHER)) for _ in range(TOGETHER)]
        assert [4.0] * TOGETHER == [future.result(60).reward for future in asked]


def test_one_that_hangs_is_cancelled_and_costs_itself_alone(tmp_path: Path) -> None:
    """Its line is told; what waits beside it in the same process is judged."""
    told = r"grade\.py:7: grade gave no answer within 1 s: it is at .*grade\.py:15$"
    with verifier(tmp_path, timeout_s=1.0) as one, ThreadPoolExecutor(2) as threads:
        hanging: Future[Judgement] = threads.submit(ask, one, "hang")
        with pytest.raises(RewardError, match=told):
            hanging.result(60)
        assert 2.0 == ask(one, "go").reward
        with pytest.raises(RewardError, match=r"grade\.py:21: grade raised ValueError: no"):
            ask(one, "raise")


@pytest.mark.parametrize(
    ("completion", "told"),
    [
        ("block", r"gave no answer within 1 s: it is at .*grade\.py:17$"),
        ("die", "died with status 3"),
    ],
)
def test_a_process_that_cannot_go_on_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completion: str, told: str
) -> None:
    """A call that holds up all others, or ends the process, costs what the process held."""
    monkeypatch.setattr(verifier_child, "CANCEL_S", 0.1)
    with verifier(tmp_path, timeout_s=1.0) as one:
        with pytest.raises(RewardError, match=told):
            ask(one, completion)
        assert 2.0 == ask(one, "go").reward


def test_a_function_is_told_what_it_asks_for(tmp_path: Path) -> None:
    """Finish reason, number of tokens and tokens, by the names of its parameters; or nothing."""
    file = tmp_path / "grade.py"
    file.write_text(
        "def grade(prompt, completion, answer, metadata, *, num_tokens, token_ids, finish_reason,"
        " base):\n"
        "    return base, {'n': num_tokens, 'last': token_ids[-1], 'cut': finish_reason != 'stop'}"
        "\n\ndef plain(prompt, completion, answer, metadata, num_tokens=7, **rest):\n"
        "    return num_tokens, {name: 1 for name in rest}\n"
    )
    section = RewardSection(
        verifier=f"{file}:grade", options={"base": 2.0}, require_stop=False, processes=1
    )
    with make_verifier(section) as one:
        judged = one.judge("?", "a", "", {}, "length", [5, 6, 9])
        assert Judgement(reward=2.0, parts={"n": 3.0, "last": 9.0, "cut": 1.0}) == judged
    with make_verifier(RewardSection(verifier=f"{file}:plain", processes=1)) as one:
        assert Judgement(reward=3.0) == one.judge("?", "a", "", {}, "stop", [5, 6, 9])
