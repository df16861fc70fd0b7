"""Contract of the sandbox: what user code of every kind may do, and what that costs."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError, DeadlineError
from rlstreams.streams.process import child
from rlstreams.workers.sandbox import process, program
from rlstreams.workers.sandbox.reward import Judgement
from tests.contract.polling import within
from tests.proc import is_alive
from tests.processes.sandbox.either import ERRORS, LINE, SOURCES, Either

ROOT = Path(__file__).parents[3]
KINDS = list(SOURCES)
# In a session of its own, with no environment, and after two forks with no parent.
DETACHED = (
    "int(subprocess.Popen(['env', '-i', 'setsid', 'sh', '-c', "
    "\"(setsid sh -c 'echo $$; exec sleep 3600' &)\"], stdout=subprocess.PIPE)"
    ".stdout.readline())"
)
UNTIL_ORPHANED = (
    "[time.sleep(1e-4) for parent in [os.getppid()]"
    " for _ in iter(lambda: os.getppid() == parent, False)] and 1"
)


@pytest.fixture(params=["function", "async class"])
def kind(request: pytest.FixtureRequest) -> str:
    """One of each: verifier and environment, called in a thread and on the loop."""
    return str(request.param)


@pytest.fixture(scope="module", params=KINDS)
def one(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Either]:
    """For calls that cost no process."""
    with Either(tmp_path_factory.mktemp("one"), request.param) as made:
        yield made


@pytest.mark.parametrize(
    ("text", "reward", "parts"),
    [
        ("0.5", 0.5, {}),
        ("True, {'n': 3}", 1.0, {"n": 3.0}),
        ("{'a': 0.25, 'b': 0.5}", 0.75, {"a": 0.25, "b": 0.5}),
        ("{'reward': 2, 'b': 0.5}", 2.0, {"b": 0.5}),
    ],
)
def test_numbers_and_parts(one: Either, text: str, reward: float, parts: dict[str, float]) -> None:
    """Parts without a `reward` are summed."""
    assert Judgement(reward=reward, parts=parts) == one.ask(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", rf"user\.py:{LINE}: code raised ZeroDivisionError: division"),
        ("bytearray(1 << 30)", rf"user\.py:{LINE}: code raised MemoryError"),
        ("float('nan')", "returned nan of type float"),
        ("(1, {'x': None})", "part 'x' is None of type NoneType"),
        ("{'x': 1, 'y': 'a'}", "part 'y' is 'a' of type str"),
        ("{}", r"returned {} of type dict; wanted a finite number, {part: number}, or \("),
        (
            "10**400",
            r"returned a value of type int that is no number \(OverflowError: int too large",
        ),
        ("{'a': 1e308, 'b': 1e308}", r"of type dict that is no number \(OverflowError"),
        (
            "type('V', (), {'__repr__': lambda self: 1 / 0})()",
            r"of type V that .*ZeroDivisionError",
        ),
        ("1e39", r"the reward must be finite and within 1e\+09 of 0, got 1e\+39"),
        ("(0.0, {'speed': -1.7e308})", r"part 'speed' of the reward must be .* got -1.7e\+308"),
        ("{'n' * (1 << 26): 1}", r"returned 67,\d+,\d+ bytes; the limit is 67,108,864"),
    ],
)
def test_what_is_no_answer_costs_its_own_sample(one: Either, text: str, message: str) -> None:
    """The error names file and line, or the value; the process goes on."""
    with pytest.raises(ERRORS, match=message) as raised:
        one.ask(text)
    assert str(one.file) in str(raised.value) or "the reward must" in message or "speed" in message
    assert 1.0 == one.ask("1").reward


def test_a_function_that_returns_nothing_on_some_path(tmp_path: Path) -> None:
    told = "returned None of type NoneType; wanted a finite .*; it must `return` one on every path"
    with Either(tmp_path, "function") as one, pytest.raises(ERRORS, match=told):
        one.ask("None")


def test_what_user_code_prints_is_no_answer(one: Either, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither lines that look like one nor bytes that are no text; it goes to the worker's log."""
    text = '[print(\'{"id": 1, "ends": {}}\', flush=True), os.write(1, bytes(range(256)))] and 0.5'
    assert 0.5 == one.ask(text).reward
    assert "" == capfd.readouterr().out


def test_a_flood_of_output_is_cut(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its beginning is in the worker's log, and a line that says so; the answer counts."""
    with Either(tmp_path, "function") as one:
        assert 0.5 == one.ask("[print('x' * 5_000_000, flush=True)] and 0.5").reward
    said = capfd.readouterr().err
    assert 2 * process.PRINTED_BYTES + 500 > len(said) > process.PRINTED_BYTES // 2
    assert "printed more than a megabyte: the rest of this minute is left out" in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_hangs_costs_itself_alone(tmp_path: Path, kind: str) -> None:
    """Its line is in the message; the next call is answered."""
    hang = "asyncio.sleep(3600)" if kind.startswith("async") else "time.sleep(3600)"
    place = rf"it is at .*user\.py:{LINE}$"
    with Either(tmp_path, kind, timeout_s=0.5) as one:
        with pytest.raises(ERRORS, match=rf"gave no answer within 0\.5 s: {place}"):
            one.ask(hang)
        assert 1.0 == one.ask("1").reward


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("os._exit(9)", "died with status 9$"),
        ("sys.exit('no licence')", "died with status 1; it last printed: no licence$"),
        ("os.kill(os.getpid(), 11)", "died of SIGSEGV$"),
        (f"os._exit({program.OUT_OF_MEMORY})", "needs more than memory_mb = 300$"),
        ("os.write(int(sys.argv[1]), b'[1]\\n') and time.sleep(3600)", "sent what is no answer"),
    ],
)
def test_a_process_that_ends_is_replaced(
    tmp_path: Path, kind: str, text: str, message: str
) -> None:
    """How it ended is in the message, and where the code stands."""
    with Either(tmp_path, kind) as one:
        with pytest.raises(ERRORS, match=rf"user\.py:\d+: .* {message}"):
            one.ask(text)
        assert 1.0 == one.ask("1").reward


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_does_not_let_go_ends_its_process(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It blocks the loop of all others, or what would break it off."""
    monkeypatch.setattr(process, "CANCEL_S", 0.1)
    block = "__import__('signal').pthread_sigmask(0, range(1, 32)) and 0 or time.sleep(3600)"
    with Either(tmp_path, kind, timeout_s=0.5) as one:
        with pytest.raises(ERRORS, match=r"gave no answer within 0\.5 s"):
            one.ask(block)
        assert 1.0 == one.ask("1").reward


@pytest.mark.parametrize("kind", ["async function", "async class"])
def test_calls_of_an_async_def_wait_side_by_side(tmp_path: Path, kind: str) -> None:
    """Each waits until all are there: one after the other, none would ever end."""
    with Either(tmp_path, kind) as one:
        assert [Judgement(reward=1.0)] * 16 == one.ask_all(["meet(16)"] * 16)


def test_answers_are_not_mixed_up(tmp_path: Path, kind: str) -> None:
    texts = [f"time.sleep(0.002) or {number}" for number in range(16)]
    with Either(tmp_path, kind, processes=2) as one:
        found = one.ask_all(texts)
        assert [Judgement(reward=float(number)) for number in range(16)] == found


def test_the_memory_limit_where_the_kernel_sets_none() -> None:
    """The fallback: a thread that watches the peak."""
    code = (
        "from program import limit_memory\nimport time\n"
        "limit_memory(100, by_kernel=False)\nx = b'x' * (150 << 20)\ntime.sleep(3600)"
    )
    folder = Path(program.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, timeout=120, check=False)
    assert program.OUT_OF_MEMORY == done.returncode


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
@pytest.mark.parametrize("text", ["os.getpid()", DETACHED])
def test_all_that_it_started_ends_when_it_is_closed(tmp_path: Path, kind: str, text: str) -> None:
    """Also what has left it in every way; then nothing is answered any more."""
    with Either(tmp_path, kind) as one:
        pid = int(one.ask(text).reward)
        assert is_alive(pid)
    within(30, lambda: None if is_alive(pid) else True, f"the end of process {pid}")
    with pytest.raises(ERRORS, match="is closed"):
        one.ask("1")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_all_that_it_started_ends_when_the_worker_is_killed(tmp_path: Path, kind: str) -> None:
    """Also where it has an answer that nobody takes any more."""
    worker = (
        "import sys, threading, time, pathlib\n"
        "from tests.processes.sandbox.either import Either\n"
        "one = Either(pathlib.Path(sys.argv[1]), sys.argv[2])\n"
        "pid = int(one.ask(sys.argv[3]).reward)\n"
        "threading.Thread(target=one.ask, args=[sys.argv[4]], daemon=True).start()\n"
        "time.sleep(0.5)\nprint(pid, flush=True)\ntime.sleep(3600)"
    )
    command = [sys.executable, "-c", worker, str(tmp_path), kind, DETACHED, UNTIL_ORPHANED]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        pid = int(running.stdout.readline())
        assert is_alive(pid)
        os.kill(running.pid, signal.SIGKILL)
    within(30, lambda: None if is_alive(pid) else True, f"the end of process {pid}")


def test_a_system_without_room_for_a_process_is_an_error_in_words(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start one that a supervisor tries again, later one of the sample; it recovers."""
    monkeypatch.setattr(process, "NUM_TRIES", 2)
    monkeypatch.setattr(process, "PAUSE_S", 0.0)
    message = r"user\.py:code has no process: in 2 tries, 0 s apart, none could be started: .*Errno"

    def no_room(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as system:
        system.setattr(child.subprocess, "Popen", no_room)
        with pytest.raises(DeadlineError, match=message):
            Either(tmp_path, kind)
    with Either(tmp_path, kind) as one:
        with pytest.raises(ERRORS, match="died"):
            one.ask("os._exit(3)")
        with monkeypatch.context() as system:
            system.setattr(child.subprocess, "Popen", no_room)
            with pytest.raises(ERRORS, match=message):
                one.ask("1")
        assert 1.0 == one.ask("1").reward


@pytest.mark.parametrize("kind", ["function", "class"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("-", r"there is no file .*user\.py"),
        ("\nx = (", r"user\.py:2: SyntaxError: '\(' was never closed"),
        ("\nimport not_there", r"user\.py:2: ModuleNotFoundError: .*; install it into /"),
        ("code = 3", r"user\.py has no \w+ 'code' \(that is 3, which cannot be called\)"),
        ("import os; os._exit(3)", r"user\.py:code cannot be loaded: it died with status 3"),
    ],
)
def test_code_that_cannot_be_loaded_is_refused(
    tmp_path: Path, kind: str, source: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Either(tmp_path, kind, source)


# Whose process the kernel, or a hand, kills while it loads.
_KILLED = """import os, signal
lives = {times}
if os.path.getsize(__file__ + ".starts") < lives:
    with open(__file__ + ".starts", "a") as file:
        file.write("x")
    os.kill(os.getpid(), signal.SIGKILL)
def code(prompt, completion, answer, metadata): return 1.0
"""


def test_a_kill_while_the_code_is_loaded_is_no_fault_of_the_code(tmp_path: Path) -> None:
    """Another process is started; code that ends each of them so is refused after some."""
    starts = tmp_path / "user.py.starts"
    starts.write_bytes(b"")
    with Either(tmp_path, "function", _KILLED.format(times=process.NUM_KILLS - 1)) as one:
        assert 1.0 == one.ask("1").reward
    starts.write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be loaded: it died of SIGKILL"):
        Either(tmp_path, "function", _KILLED.format(times=100))
    assert process.NUM_KILLS == starts.stat().st_size


def test_code_that_hangs_while_it_is_loaded_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end that it is given is no kill by others; the message says which line it is at."""
    monkeypatch.setattr(process, "START_S", 2.0)
    source = "import time\nopen(__file__ + '.starts', 'a').write('x')\ntime.sleep(3600)"
    with pytest.raises(ConfigError, match=r"no answer within 2 s: it is at .*user\.py:3$"):
        Either(tmp_path, "function", source)
    assert 1 == (tmp_path / "user.py.starts").stat().st_size


_INIT = "class code:\n    def __init__(self, *a): pass\n"


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("function", "def cde(): pass", r"no function 'code' \(it has: cde; did you mean 'cde'\?"),
        ("function", "def code(a): pass", r"py:1: code\(a\) cannot be called with \(prompt, comp"),
        ("function", "def code(a): pass", r"`def code\(prompt, completion, answer, metadata\):`"),
        ("class", "class cde: pass", r"no class 'code' \(it has: cde; did you mean 'cde'\?"),
        ("class", "def code(a): pass", r"must be a class with a method `step\(self, completion\)`"),
        ("class", _INIT, r"must be a class with a method `step\(self, completion\)`"),
        ("class", "class code:\n    def step(self, a): pass", r"`def __init__\(self, prompt, answ"),
        ("class", _INIT + "    def step(self, a, b): pass", r"py:3: code\.step.* \(completion\):"),
    ],
)
def test_code_that_cannot_be_called_is_refused(
    tmp_path: Path, kind: str, source: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Either(tmp_path, kind, source)
