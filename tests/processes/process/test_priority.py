"""Whatever computes gives way to the log, with its whole session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.cli import worker
from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.streams.process.priority import COMPUTES, give_way
from rlstreams.workers.engines.served.command import StartCommand
from rlstreams.workers.loop.runtime import Stop
from rlstreams.workers.server.process import ServerProcess

LIMIT_S = 20.0
DEMO = Path(__file__).parents[3] / "infra/examples/demo.toml"
SLEEP = ("sleep", "60")
# Its own child inherits both; its session's weight is asked for by whatever process is in it.
ASK = (
    "import os; from pathlib import Path; from rlstreams.streams.process.priority import give_way; "
    "give_way(5); p = Path('/proc/self/autogroup'); "
    "print(os.nice(0), ((p.read_text() if p.exists() else '').split() or ['-'])[-1])"
)


def priorities(pid: int) -> tuple[int, str]:
    """Of a process and of its session; `-`: it has none.

    A system may know no weight of sessions (no file), and a process that was started outside of any
    session has none (an empty file).
    """
    group = Path(f"/proc/{pid}/autogroup")
    words = group.read_text("ascii").split() if group.exists() else []
    return os.getpriority(os.PRIO_PROCESS, pid), (words or ["-"])[-1]


def low() -> tuple[int, str]:
    """What a process in a session of its own has when both gave way."""
    with subprocess.Popen(SLEEP, start_new_session=True) as leader:
        whole = priorities(leader.pid)[1]
        leader.kill()
    return COMPUTES, "-" if whole == "-" else str(COMPUTES)


LOW = low()


@pytest.mark.parametrize("orphaned", [Orphaned.LIVES, Orphaned.DIES])
def test_a_child_gives_way_with_its_session(orphaned: Orphaned) -> None:
    own = priorities(os.getpid())
    child, alike = (Child.started(SLEEP, orphaned=orphaned, gives_way=by) for by in (COMPUTES, 0))
    try:
        assert LOW == priorities(child.pid)
        assert own == priorities(os.getpid())
        assert own[0] == priorities(alike.pid)[0]
    finally:
        child.end()
        alike.end()


def test_a_model_server_gives_way(tmp_path: Path) -> None:
    process = ServerProcess(StartCommand(argv=SLEEP, environment={}), tmp_path / "vllm.log")
    process.start()
    try:
        assert process.child is not None
        assert LOW == priorities(process.child.pid)
    finally:
        process.end()


def test_a_process_in_another_ones_session_leaves_the_session_alone() -> None:
    """A worker that is typed into a terminal must not slow what else was started there."""
    said = {
        is_leader: subprocess.run(
            [sys.executable, "-c", ASK], capture_output=True, text=True, check=True,
            start_new_session=is_leader, timeout=LIMIT_S,
        ).stdout.split()
        for is_leader in (False, True)
    }  # fmt: skip
    assert said[True] == [str(LOW[0]), LOW[1]]
    assert said[False] == [str(COMPUTES), priorities(os.getpid())[1]]


def test_a_process_that_is_gone_is_no_error() -> None:
    child = Child.started(("true",), orphaned=Orphaned.LIVES)
    assert child.wait(LIMIT_S)
    give_way(COMPUTES, child.pid)


@pytest.mark.parametrize(
    ("role", "words", "expected"),
    [
        ("trainer", [], True),
        ("ranks", [], True),
        ("rollout", [], True),
        ("rollout", ["rollout.engine=vllm"], False),
        ("logprob", [], True),
        ("prompts", [], False),
        ("server", [], False),
    ],
)
def test_roles_that_compute_give_way_before_they_import(
    role: str, words: list[str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr(worker, "give_way", said.append)
    monkeypatch.setattr(worker, "set_threads", lambda _: None)
    monkeypatch.setattr(Stop, "on_signals", lambda _: None)
    for name in ("_work", "_serve_ranks"):
        monkeypatch.setattr(worker, name, lambda *_: said.append("works"))
    words = [*words, f"run.dir={tmp_path}"]
    assert 0 == main(["worker", role, str(DEMO), *(f"--{word}" for word in words)])
    assert said == ([COMPUTES] if expected else []) + ["works"]
