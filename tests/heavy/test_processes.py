"""What only a fresh Python process shows: what it imports, how soon it answers, how it ends."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "infra/examples/demo.toml"
DEMO_MODEL = ROOT / "infra/examples/demo/model"

HANGS = """
import threading
from rlstreams.workers.loop.runtime import Stop, run
from rlstreams.workers.loop.stall import Watchdog
class Hangs:
    done = False
    def tick(self): self.ask_the_broker()
    def ask_the_broker(self): threading.Event().wait()
    def drain(self): pass
    def close(self): pass
run(Hangs(), Stop(), Watchdog(0.2))
"""
SET_BACK = """
import threading, time
from rlstreams.workers.loop import stall
from rlstreams.workers.loop.runtime import Stop, run
now, asked = time.time, []
def at():
    if threading.current_thread().name == "watchdog":
        asked.append(None)
    return now() - (3600 if len(asked) > 1 else 0)
time.time, stall.TICK_S = at, 0.1
class Waits:
    done = False
    def tick(self):
        while len(asked) < 5:
            time.sleep(0.05)
        self.done = True
    def drain(self): pass
    def close(self): pass
run(Waits(), Stop(), stall.Watchdog(600, minds_clock={minds}))
"""
LINGERS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from rlstreams.workers.loop.runtime import end_within
ThreadPoolExecutor(1).submit(threading.Event().wait)
end_within(7, 0.1)
"""


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_help_is_quick():
    """Half a second of one core, the best of three, so that a busy machine tells the same."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "rlstreams", "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(sum(after[:2]) - sum(before[:2]))  # user and system
    assert 0 == done.returncode
    assert "config" in done.stdout
    assert min(seconds) < 0.5


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        (
            "from rlstreams.__main__ import main; main(['--help'])",
            "torch transformers confluent_kafka kafka rich matplotlib msgspec numpy pyarrow",
        ),
        (f"from rlstreams.__main__ import main; main(['doctor', {str(DEMO)!r}])", "torch"),
        ("import rlstreams.up.supervisor.up", "torch aiohttp starlette"),
        (
            "from rlstreams.workers.model.tokenizer import Tokenizer; "
            f"Tokenizer({str(DEMO_MODEL)!r})",
            "torch transformers jinja2",
        ),
    ],
    ids=["help", "doctor", "up", "tokenizer"],
)
def test_nothing_heavy_is_imported(program: str, heavy: str) -> None:
    """Nothing that takes seconds is between a user and an answer, or a role and its start."""
    done = ended(f"{program}; import sys; print(sorted(set({heavy.split()}) & set(sys.modules)))")
    assert (0, "[]") == (done.returncode, done.stdout.splitlines()[-1])


def test_a_tick_that_never_ends() -> None:
    """The process ends as failed and says where it stood."""
    done = ended(HANGS)
    assert 1 == done.returncode
    assert "its limit is 0.2 s" in done.stderr
    assert "in ask_the_broker" in done.stderr


def test_a_clock_that_is_set_back_ends_the_process_at_once() -> None:
    """The client's waits would last as much longer; no limit of ours is near."""
    done = ended(SET_BACK.format(minds=True))
    assert 1 == done.returncode
    assert "StuckError: the clock of this host was set back by 3600 s" in done.stderr
    assert 0 == ended(SET_BACK.format(minds=False)).returncode, "it never waits in the client"


def test_an_ended_process_is_not_kept_by_what_computes() -> None:
    """The interpreter would wait for a thread that never returns."""
    assert 7 == ended(LINGERS).returncode


def test_a_process_dies_at_the_asked_count():
    """`commit.before:2` survives the first time and is killed at the second."""
    script = (
        "from rlstreams.streams.log.crash_points import CrashPoint, arm_from, reach\n"
        "arm_from('commit.before:2')\n"
        "reach(CrashPoint.COMMIT_BEFORE); print('once', flush=True)\n"
        "reach(CrashPoint.COMMIT_BEFORE); print('twice', flush=True)\n"
    )
    done = ended(script)
    assert (-signal.SIGKILL, "once\n") == (done.returncode, done.stdout)
