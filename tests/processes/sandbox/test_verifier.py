"""A user's function as a verifier: what it is called with, where it comes from, how often."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.reward import RewardSection
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, RewardError, Verifier
from rlstreams.workers.sandbox.user_code import EditedCodeError


def verifier(folder: Path, body: str, **changes: Any) -> Verifier:
    """Of a file with this text; its function is called `grade`."""
    file = folder / "grade.py"
    file.write_text(body)
    values: dict[str, Any] = {"verifier": f"{file}:grade", "processes": 1, "timeout_s": 60.0}
    return make_verifier(RewardSection(**values | changes))


def test_a_function_gets_what_it_has_parameters_for(tmp_path: Path) -> None:
    """The sample; finish reason, number of tokens, tokens and turns, by name; options first."""
    body = (
        "def grade(prompt, completion, answer, metadata, *, num_tokens, token_ids, finish_reason,"
        " transcript, base):\n"
        "    assert (prompt, completion, answer, metadata) == ('7+8=', 'a', '15', {'level': 2})\n"
        "    return base, {'n': num_tokens, 'last': token_ids[-1], 'cut': finish_reason != 'stop',"
        " 'turns': len(transcript)}\n"
    )
    said = [{"author": "policy", "text": "a"}]
    sample = AnswerToJudge("7+8=", "a", "15", {"level": 2}, "length", [5, 6, 9], said)
    with verifier(tmp_path, body, options={"base": 2.0}, require_stop=False) as one:
        parts = {"n": 3.0, "last": 9.0, "cut": 1.0, "turns": 1.0}
        assert Judgement(reward=2.0, parts=parts) == one.judge(sample)
    plain = (
        "def grade(prompt, completion, answer, metadata, num_tokens=7, **rest):\n"
        "    return num_tokens, {name: 1 for name in rest}\n"
    )
    with verifier(tmp_path, plain, require_stop=False) as one:
        assert Judgement(reward=3.0) == one.judge(sample)


# Raises as often as the completion says, then gives how often it was called for this answer.
FAILS = """
import os
class Refused(Exception):
    final = True
calls = {}
def grade(prompt, completion, answer, metadata):
    calls[answer] = calls.get(answer, 0) + 1
    if completion == "refuse":
        raise Refused(f"call {calls[answer]}")
    if calls[answer] <= int(completion):
        raise ConnectionError(f"call {calls[answer]}")
    return calls[answer]
"""


def test_what_raises_is_tried_again(tmp_path: Path) -> None:
    """As often as `reward.attempts` says, unless the exception says that it is final."""
    with verifier(tmp_path, FAILS, attempts=3) as one:
        assert 3 == one.judge(AnswerToJudge("", "2", "a", {})).reward
        with pytest.raises(RewardError, match=r"ConnectionError: call 3, the last of 3 attempts"):
            one.judge(AnswerToJudge("", "9", "b", {}))
        with pytest.raises(RewardError, match=r"Refused: call 1$"):
            one.judge(AnswerToJudge("", "refuse", "c", {}))
    with (
        verifier(tmp_path, FAILS, attempts=1) as one,
        pytest.raises(RewardError, match=r"ConnectionError: call 1$"),
    ):
        one.judge(AnswerToJudge("", "1", "a", {}))


def test_who_only_shared_a_process_that_died_is_judged_in_another(tmp_path: Path) -> None:
    """Of two calls side by side one ends the process; the other is not to blame."""
    body = """
import asyncio, os, pathlib
here = []
async def grade(prompt, completion, answer, metadata):
    here.append(completion)
    while completion == "die" and len(here) < 2:
        await asyncio.sleep(0.01)
    seen = pathlib.Path(answer)
    if completion == "die":
        while seen.exists() and not seen.with_name("lives").exists():
            await asyncio.sleep(0.01)
        seen.touch()
        os._exit(3)
    await asyncio.sleep(0 if seen.exists() else 3600)
    return 1.0
"""

    async def both(one: Verifier) -> list[Judgement | BaseException]:
        async def verified(text: str) -> Judgement:
            found = await one.verify(AnswerToJudge("", text, str(tmp_path / "seen"), {}))
            (tmp_path / "lives").touch()
            return found

        return await asyncio.gather(verified("live"), verified("die"), return_exceptions=True)

    with verifier(tmp_path, body, attempts=2) as one:
        lives, dies = asyncio.run(both(one))
    assert Judgement(reward=1.0) == lives
    assert "grade died with status 3" in str(dies)


def test_a_file_imports_its_neighbours_but_not_ours(tmp_path: Path) -> None:
    """A neighbour called reward.py is the user's, not the package's."""
    (tmp_path / "reward.py").write_text("VALUE = 0.25\n")
    body = "import reward\ndef grade(prompt, completion, answer, metadata): return reward.VALUE\n"
    with verifier(tmp_path, body) as one:
        assert 0.25 == one.judge(AnswerToJudge("", "", "", {})).reward


def test_a_function_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, or below the working folder; one that is not there is said at the start."""
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "judges.py").write_text(
        "def grade(prompt, completion, answer, metadata):\n    return 1 / len(completion)\n"
    )
    monkeypatch.chdir(tmp_path)
    with make_verifier(RewardSection(verifier="mypackage.judges:grade", attempts=1)) as one:
        assert 0.5 == one.judge(AnswerToJudge("", "ab", "", {})).reward
        with pytest.raises(RewardError, match=r"judges\.py:2: grade raised ZeroDivisionError"):
            one.judge(AnswerToJudge("", "", "", {}))
    with pytest.raises(ConfigError, match=r"no module 'mypackage\.none' in"):
        make_verifier(RewardSection(verifier="mypackage.none:grade"))


def test_another_process_never_runs_other_code_than_the_first(tmp_path: Path) -> None:
    """The file is edited, the process dies: the worker ends, and judges by neither."""
    body = (
        "import os\ndef grade(prompt, completion, answer, metadata):\n"
        "    return os._exit(1) if completion == 'die' else 1.0\n"
    )
    with verifier(tmp_path, body, attempts=1) as one:
        assert 1.0 == one.judge(AnswerToJudge("", "a", "", {})).reward
        (tmp_path / "grade.py").write_text(body.replace("1.0", "2.0"))
        assert 1.0 == one.judge(AnswerToJudge("", "a", "", {})).reward
        with pytest.raises(RewardError, match="died with status 1"):
            one.judge(AnswerToJudge("", "die", "", {}))
        with pytest.raises(EditedCodeError, match=r"grade\.py was edited after this worker"):
            one.judge(AnswerToJudge("", "a", "", {}))
