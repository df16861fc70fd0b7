"""Verifiers: what an answer earns, and what a broken user function is told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.reward import RewardPart, RewardSection
from rlstreams.workers.rollout import verifier_process
from rlstreams.workers.rollout.make_verifier import make_verifier
from rlstreams.workers.rollout.reward import Judgement, RewardError, Verifier


def verifier(name: str, *, require_stop: bool = True, timeout_s: float = 60.0) -> Verifier:
    return make_verifier(
        RewardSection(verifier=name, require_stop=require_stop, timeout_s=timeout_s)
    )


def judge(one: Verifier, completion: str, answer: str, finish_reason: str = "stop") -> Judgement:
    return one.judge("7+8=", completion, answer, {"level": 2}, finish_reason)


def user_file(folder: Path, body: str) -> str:
    """`body` is the function's; its first line stands on line 4 of the file."""
    file = folder / "grade.py"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    file.write_text(
        f"import os, time\n\ndef grade(prompt, completion, answer, metadata):\n{lines}\n"
    )
    return f"{file}:grade"


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("12,21", "21", 1.0),
        ("~24", "21", 0.0),
        ("~21", "21", 1.0),
        ("12 , 21", "21", 1.0),
        ("the sum is 21.", "21", 1.0),
        ("It is...21", "21.0", 1.0),
        ("-3", "-3", 1.0),
        ("10-3", "3", 1.0),
        ("x=.5", "0.5", 1.0),
        ("21,", "21", 1.0),
        ("none", "21", 0.0),
        ("", "0", 0.0),
    ],
)
def test_numeric_compares_the_last_number(completion: str, answer: str, reward: float) -> None:
    """The last number decides, whatever stands before it."""
    with verifier("numeric") as one:
        assert reward == judge(one, completion, answer).reward


def test_numeric_names_an_answer_that_is_no_number() -> None:
    """A row whose answer cannot be compared is an error, not a 0."""
    with verifier("numeric") as one, pytest.raises(RewardError, match="'many'"):
        judge(one, "3", "many")


def test_exact_ignores_white_space_around() -> None:
    """Equality is of the stripped texts."""
    with verifier("exact") as one:
        assert judge(one, " a b\n", "a b").reward == 1.0
        assert judge(one, "ab", "a b").reward == 0.0


def test_an_unfinished_answer_earns_nothing() -> None:
    """What max_new_tokens cut earns 0 although its last number is right."""
    with verifier("numeric") as one:
        assert judge(one, "21", "21", "length").reward == 0.0
    with verifier("numeric", require_stop=False) as one:
        assert judge(one, "21", "21", "length").reward == 1.0


@pytest.mark.parametrize("name", ["exactly", "file.py", ":f", "file.py:"])
def test_an_unknown_verifier_is_refused(name: str) -> None:
    """The message names the field, the value and what is allowed."""
    with pytest.raises(ConfigError, match=r"reward\.verifier must be one of exact, numeric"):
        verifier(name)


def test_the_nearest_verifier_is_named() -> None:
    """A typing error is answered with what was meant."""
    with pytest.raises(ConfigError, match=r"got 'numerc'; did you mean 'numeric'\?"):
        verifier("numerc")


def test_a_users_function_gives_reward_and_parts(tmp_path: Path) -> None:
    """It sees prompt, completion, answer and metadata, and may return parts."""
    name = user_file(
        tmp_path,
        "assert (prompt, answer, metadata) == ('7+8=', '15', {'level': 2})\n"
        "return 0.5, {'length': len(completion)}",
    )
    with verifier(name) as one:
        assert Judgement(reward=0.5, parts={"length": 3.0}) == judge(one, "abc", "15")


def test_a_verifier_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    """The message leads to the line, and the next answer is judged."""
    name = user_file(tmp_path, "return 1 / int(completion)")
    with verifier(name) as one:
        with pytest.raises(RewardError, match=r"grade\.py:4: grade raised ZeroDivisionError"):
            judge(one, "0", "")
        assert judge(one, "2", "").reward == 0.5


@pytest.fixture(scope="module")
def evaluates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    """Its answer is what the completion says; one process for all that ask it."""
    with verifier(user_file(tmp_path_factory.mktemp("evaluates"), "return eval(completion)")) as it:
        yield it


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("None", "returned None of type NoneType"),
        ("'1'", "returned '1' of type str"),
        ("float('nan')", "returned nan of type float"),
        ("(1, {'x': None})", "part 'x' is None"),
        ("{'x': 1, 'y': 'a'}", "part 'y' is 'a'"),
        ("{}", "returned {} of type dict"),
        ("{'reward': 'a'}", "returned 'a' of type str"),
    ],
)
def test_a_verifier_that_returns_no_number(evaluates: Verifier, returned: str, told: str) -> None:
    """What it returned is in the message, with file and line of the function."""
    with pytest.raises(RewardError) as caught:
        judge(evaluates, returned, "")
    assert f"grade.py:3 {told}" in str(caught.value)


def test_a_verifier_that_hangs_is_replaced(tmp_path: Path) -> None:
    """Its deadline ends one judgement only; the line where it hangs is told."""
    name = user_file(tmp_path, "x = 1\ntime.sleep(3600 if completion == 'hang' else 0)\nreturn x")
    told = r"grade\.py:3: grade gave no answer within 0\.3 s: it is at .*grade\.py:5$"
    with verifier(name, timeout_s=0.3) as one:
        with pytest.raises(RewardError, match=told):
            judge(one, "hang", "")
        assert judge(one, "go", "").reward == 1.0


def test_a_verifier_that_dies_is_replaced(tmp_path: Path) -> None:
    """The status of the dead process is told, and the next answer is judged."""
    name = user_file(tmp_path, "os._exit(9) if completion == 'die' else None\nreturn 1")
    with verifier(name) as one:
        with pytest.raises(RewardError, match="died with status 9"):
            judge(one, "die", "")
        assert judge(one, "go", "").reward == 1.0


def test_a_verifier_that_exits_costs_one_judgement(tmp_path: Path) -> None:
    """`sys.exit` in a library is no different from death."""
    name = user_file(
        tmp_path, "import sys\nsys.exit(3) if completion == 'exit' else None\nreturn 1"
    )
    with verifier(name) as one:
        with pytest.raises(RewardError, match=r"grade\.py:3: grade died with status 3"):
            judge(one, "exit", "")
        assert judge(one, "go", "").reward == 1.0


def test_what_a_verifier_prints_is_no_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither lines that look like one nor bytes that are no text; it goes to the worker's log."""
    name = user_file(
        tmp_path,
        'print(\'{"reward": 7, "parts": {}}\', flush=True)\n'
        "os.write(1, bytes(range(256)))\nos.write(2, b'\\xff\\n')\nreturn 0.5",
    )
    with verifier(name) as one:
        assert [0.5, 0.5] == [judge(one, "", "").reward for _ in range(2)]
    assert "" == capfd.readouterr().out


def test_a_verifier_that_writes_to_its_link_is_replaced(tmp_path: Path) -> None:
    """Garbage on the wire costs one judgement, and the next one has a clean wire."""
    body = (
        "import sys\nif completion == 'bad':\n    os.write(int(sys.argv[1]), b'[1]\\n')\n"
        "    time.sleep(3600)\nreturn 1"
    )
    with verifier(user_file(tmp_path, body)) as one:
        with pytest.raises(RewardError, match="sent what is no answer"):
            judge(one, "bad", "")
        assert judge(one, "go", "").reward == 1.0


def test_a_verifier_that_eats_memory_costs_one_judgement(tmp_path: Path) -> None:
    """What is beyond reward.memory_mb cannot be had; the worker and the next answer are safe."""
    name = user_file(tmp_path, "x = bytearray(int(completion) << 20)\nreturn len(x) >> 20")
    section = RewardSection(verifier=name, memory_mb=200, processes=1)
    with make_verifier(section) as one:
        with pytest.raises(RewardError, match=r"grade\.py:4: grade raised MemoryError"):
            judge(one, "400", "")
        assert judge(one, "50", "").reward == 50.0


def test_where_the_kernel_sets_no_limit_the_process_ends_itself(tmp_path: Path) -> None:
    """The fallback: a thread that watches the peak."""
    code = (
        "from verifier_process import limit_memory\nimport time\n"
        "limit_memory(100, by_kernel=False)\nx = b'x' * (150 << 20)\ntime.sleep(3600)"
    )
    folder = Path(verifier_process.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, timeout=120, check=False)
    assert verifier_process.OUT_OF_MEMORY == done.returncode


def test_a_function_may_be_asynchronous(tmp_path: Path) -> None:
    """It is awaited; what it raises names its line."""
    file = tmp_path / "grade.py"
    file.write_text(
        "import asyncio\nasync def grade(prompt, completion, answer, metadata):\n"
        "    await asyncio.sleep(0)\n    return {'a': 0.25, 'b': 1 / len(completion)}\n"
    )
    with verifier(f"{file}:grade") as one:
        assert Judgement(reward=0.75, parts={"a": 0.25, "b": 0.5}) == judge(one, "ab", "")
        with pytest.raises(RewardError, match=r"grade\.py:4: grade raised ZeroDivisionError"):
            judge(one, "", "")


def test_a_function_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, or below the working folder; one that is not there is said at the start."""
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "judges.py").write_text(
        "def grade(prompt, completion, answer, metadata):\n    return 1 / len(completion)\n"
    )
    monkeypatch.chdir(tmp_path)
    with verifier("mypackage.judges:grade") as one:
        assert judge(one, "ab", "").reward == 0.5
        with pytest.raises(RewardError, match=r"judges\.py:2: grade raised ZeroDivisionError"):
            judge(one, "", "")
    with pytest.raises(ConfigError, match=r"no module 'mypackage\.none' in"):
        verifier("mypackage.none:grade")


def test_a_function_that_cannot_be_called_as_wanted(tmp_path: Path) -> None:
    """Its signature and the one that is wanted are told, with file and line."""
    file = tmp_path / "grade.py"
    file.write_text("\ndef grade(completion, answer):\n    return 1\n")
    told = (
        r"grade\.py:2: grade\(completion, answer\) cannot be called with \(prompt, completion, ans"
        r".*; write `def grade\(prompt, completion, answer, metadata\):`"
    )
    with pytest.raises(ConfigError, match=told):
        verifier(f"{file}:grade")


def test_an_import_that_fails_is_named_with_its_line(tmp_path: Path) -> None:
    """Before any sample is judged."""
    file = tmp_path / "grade.py"
    file.write_text("import json\nimport no_such_package\n")
    with pytest.raises(
        ConfigError, match=r"grade\.py:2: ModuleNotFoundError: No module .*; install it into /"
    ):
        verifier(f"{file}:grade")


def test_judge_is_thread_safe(tmp_path: Path) -> None:
    """Answers of calls that overlap are not mixed up."""
    name = user_file(tmp_path, "time.sleep(0.002)\nreturn float(completion)")
    got: dict[int, float] = {}
    with verifier(name) as one:
        threads = [
            threading.Thread(target=lambda i=i: got.update({i: judge(one, str(i), "").reward}))
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert {i: float(i) for i in range(8)} == got


def test_files_that_cannot_be_loaded_are_configuration_errors(tmp_path: Path) -> None:
    """Missing file, syntax error with its line, missing function: said before any sample."""
    with pytest.raises(ConfigError, match=r"there is no file .*nowhere\.py"):
        verifier("nowhere.py:grade")
    broken = user_file(tmp_path, "return (")
    with pytest.raises(ConfigError, match=r"grade\.py:4: SyntaxError: '\(' was never closed"):
        verifier(broken)
    with pytest.raises(ConfigError, match="has no function 'mark'"):
        verifier(user_file(tmp_path, "return 1").replace(":grade", ":mark"))


def test_a_user_file_imports_its_neighbours_but_not_ours(tmp_path: Path) -> None:
    """A neighbour called reward.py is the user's, not the package's."""
    (tmp_path / "reward.py").write_text("VALUE = 0.25\n")
    name = user_file(tmp_path, "import reward\nreturn reward.VALUE")
    with verifier(name) as one:
        assert judge(one, "", "").reward == 0.25


def test_close_ends_the_children(tmp_path: Path) -> None:
    """A closed verifier judges no more, and leaves no process behind."""
    name = user_file(tmp_path, "return os.getpid()")
    one = verifier(name)
    pid = int(judge(one, "", "").reward)
    one.close()
    with pytest.raises(RewardError, match="closed"):
        judge(one, "", "")
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("1e39", r"the reward must be finite and within 1e\+09 of 0, got 1e\+39"),
        ("(0.0, {'speed': -1.7e308})", r"part 'speed' of the reward must be .* got -1.7e\+308"),
    ],
)
def test_a_reward_that_no_step_could_take_is_refused(
    tmp_path: Path, returned: str, told: str
) -> None:
    """It is a number in Python and an infinity where it would be learnt from."""
    file = user_file(tmp_path, f"return {returned}")
    with verifier(file) as one, pytest.raises(RewardError, match=told):
        judge(one, "15", "15")


def test_the_bound_holds_for_every_verifier() -> None:
    """A weight can make too much of an honest number."""
    parts = (RewardPart(verifier="numeric", weight=1e10),)
    with make_verifier(RewardSection(verifier="sum", parts=parts)) as one:
        assert 0.0 == judge(one, "14", "15").reward
        with pytest.raises(RewardError, match=r"got 10000000000\.0"):
            judge(one, "15", "15")
