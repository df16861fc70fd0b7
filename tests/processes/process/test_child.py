"""Children as they are: real processes, with what they start, their owners, their ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlstreams.streams.process import child as module
from rlstreams.streams.process.child import Child, Orphaned
from tests.proc import is_alive

DEADLINE_S = 60.0
Owned = Callable[..., tuple[subprocess.Popen[str], int, int]]
SLEEPS = "import time; print('up', flush=True); time.sleep(3600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
# Forks twice, leaves its session, clears its environment; says who it is, and sleeps.
LEAVES = """
import os, sys, time
folder = sys.argv[1]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
        name = f"{folder}/{os.getpid()}"
        os.execve("/bin/sh", ["sh", "-c", f"touch {name}; exec sleep 3600"], {})
    os._exit(0)
time.sleep(3600)
"""
# An owner: starts a child as told, says its process ids, waits.
OWNER = """
import sys, time
from pathlib import Path
from rlstreams.streams.process.child import Child, Orphaned
child = Child.started(
    [sys.executable, "-S", "-c", *sys.argv[2:]], orphaned=Orphaned(sys.argv[1]), stdout=2
)
print(child.pid, child._handle.pid, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.kill()
        child.wait(DEADLINE_S)


@pytest.fixture
def owned() -> Iterator[Owned]:
    """Makes an owner with a child; process ids of its program and of what stands between."""
    owners: list[subprocess.Popen[str]] = []
    programs: list[int] = []

    def make(orphaned: Orphaned, *words: str) -> tuple[subprocess.Popen[str], int, int]:
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, orphaned, *words], stdout=subprocess.PIPE, text=True
        )
        owners.append(owner)
        assert owner.stdout is not None
        program, reaper = map(int, owner.stdout.readline().split())
        programs.append(program)
        return owner, program, reaper

    yield make
    for owner, program in zip(owners, programs, strict=True):
        owner.kill()
        owner.communicate()
        if is_alive(program):
            os.killpg(program, signal.SIGKILL)


def python(script: str, orphaned: Orphaned, *words: str, log: Path | None = None) -> Child:
    argv = [sys.executable, "-S", "-c", script, *words]
    return Child.started(argv, orphaned=orphaned, log=log)


def until(reached: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


@pytest.mark.parametrize("orphaned", Orphaned)
def test_an_exit_status_is_the_programs(orphaned: Orphaned, children: list[Child]) -> None:
    for status in (0, 7):
        child = python(f"raise SystemExit({status})", orphaned)
        children.append(child)
        assert child.wait(DEADLINE_S)
        assert (status, "is done" if not status else f"failed (exit {status})") == (
            child.poll(), child.cause()
        )  # fmt: skip


@pytest.mark.parametrize("orphaned", Orphaned)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_an_end_by_a_signal_is_named(
    orphaned: Orphaned, number: signal.Signals, children: list[Child]
) -> None:
    child = python(SLEEPS, orphaned)
    children.append(child)
    assert (None, "") == (child.poll(), child.cause())
    os.kill(child.pid, number)
    assert child.wait(DEADLINE_S)
    assert (-number, f"was ended by {number.name}") == (child.poll(), child.cause())


def test_the_cause_carries_the_last_error_of_this_process_alone(
    tmp_path: Path, children: list[Child]
) -> None:
    log = tmp_path / "log"
    raises = "print('before', flush=True); raise OSError(28, 'No space left on device')"
    for script in (raises, "raise SystemExit(1)"):
        children.append(python(script, Orphaned.DIES, log=log))
        assert children[-1].wait(DEADLINE_S)
    first, second = children
    assert "failed (exit 1): OSError: [Errno 28] No space left on device" == first.cause()
    assert "failed (exit 1)" == second.cause()
    assert "OSError: [Errno 28] No space left on device" == second.log_tail()[-1]
    assert 1 == len(second.log_tail(1))


@pytest.mark.parametrize("orphaned", Orphaned)
def test_who_ignores_sigterm_is_killed(
    orphaned: Orphaned, tmp_path: Path, children: list[Child]
) -> None:
    for script, patience_s, expected in (
        (DEAF, 0.2, -signal.SIGKILL),
        (SLEEPS, DEADLINE_S, -signal.SIGTERM),
    ):
        child = python(script, orphaned, log=tmp_path / script[:9])
        children.append(child)
        until(child.log_tail, "it is up")
        assert expected == child.end(patience_s)
        assert expected == child.end()


@pytest.mark.parametrize("orphaned", Orphaned)
def test_the_end_is_that_of_the_whole_session(
    orphaned: Orphaned, tmp_path: Path, children: list[Child]
) -> None:
    """What it started keeps its session, and would live on."""
    script = (
        "import subprocess, time; print(subprocess.Popen(['sleep', '3600']).pid, flush=True)\n"
        "time.sleep(3600)"
    )
    child = python(script, orphaned, log=tmp_path / "log")
    children.append(child)
    until(child.log_tail, "it is up")
    (started,) = map(int, child.log_tail())
    assert is_alive(started)
    child.end()
    until(lambda: not is_alive(started), "what it started is gone")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_nothing_that_it_started_gets_away(tmp_path: Path, children: list[Child]) -> None:
    """Neither by a double fork, nor by a session of its own, nor by a cleared environment."""
    child = python(LEAVES, Orphaned.DIES, str(tmp_path))
    children.append(child)
    until(lambda: len(list(tmp_path.iterdir())) == 2, "both are up")
    left = [int(path.name) for path in tmp_path.iterdir()]
    assert all(map(is_alive, left))
    child.kill()
    assert child.wait(DEADLINE_S)
    assert [] == [pid for pid in left if is_alive(pid)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_what_it_left_behind_ends_with_it(tmp_path: Path, children: list[Child]) -> None:
    """Whether it ended well or was killed by somebody else."""
    for name in ("well", "killed"):
        (tmp_path / name).mkdir()
        script = LEAVES if name == "killed" else LEAVES.replace("time.sleep(3600)", "time.sleep(1)")
        child = python(script, Orphaned.DIES, str(tmp_path / name))
        children.append(child)
        until(lambda name=name: len(list((tmp_path / name).iterdir())) == 2, "both are up")
        if name == "killed":
            os.kill(child.pid, signal.SIGKILL)
        assert child.wait(DEADLINE_S)
        left = [int(path.name) for path in (tmp_path / name).iterdir()]
        assert [] == [pid for pid in left if is_alive(pid)]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_owner_that_is_killed_takes_it_along(
    tmp_path: Path, owned: Owned, *, is_stopped: bool
) -> None:
    """With all that it started; also while it is stopped, and could hear of nothing."""
    owner, program, _ = owned(Orphaned.DIES, LEAVES, str(tmp_path))
    until(lambda: len(list(tmp_path.iterdir())) == 2, "both are up")
    left = [program, *(int(path.name) for path in tmp_path.iterdir())]
    if is_stopped:
        for pid in left:
            os.kill(pid, signal.SIGSTOP)
    owner.kill()
    owner.wait()
    until(lambda: not any(map(is_alive, left)), "nothing is left")


def test_a_reaper_that_is_killed_takes_its_program_along(owned: Owned) -> None:
    _, program, reaper = owned(Orphaned.DIES, SLEEPS)
    os.kill(reaper, signal.SIGKILL)
    until(lambda: not is_alive(program), "it is gone")


@pytest.mark.skipif(os.geteuid() != 0, reason="hides /proc from a process: root")
def test_a_reaper_that_does_not_see_processes_ends_its_programs_group() -> None:
    """In a container without /proc; it says what that costs."""
    script = f"import os, sys, time; os.fork(); {SLEEPS}"
    hidden = 'mount -t tmpfs none /proc && exec "$@"'
    report, theirs = os.pipe()
    words = ["unshare", "-m", "sh", "-c", hidden, "sh", sys.executable, "-I", "-S"]
    words += [module._REAPER, str(theirs), sys.executable, "-c", script]
    reaper = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, pass_fds=[theirs],
    )  # fmt: skip
    os.close(theirs)
    program = os.read(report, 100).split()
    os.close(report)
    if not program:
        pytest.skip("nothing can be mounted here")
    assert reaper.stdout is not None
    assert ["up", "up"] == [reaper.stdout.readline().strip() for _ in range(2)]
    said, errors = reaper.communicate(timeout=DEADLINE_S)  # closes its input
    assert ("", -signal.SIGKILL) == (said, reaper.returncode)  # both have closed their output
    assert "reaper: /proc does not show this process" in errors


def test_an_owner_that_is_killed_leaves_a_broker(owned: Owned) -> None:
    owner, program, _ = owned(Orphaned.LIVES, SLEEPS)
    owner.kill()
    owner.wait()
    time.sleep(0.3)
    assert is_alive(program)


def test_who_drains_hears_of_its_owners_end(tmp_path: Path, owned: Owned) -> None:
    """And reads nothing of the pipe by mistake, neither itself nor what it starts."""
    script = (
        "import subprocess, sys, time; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(module.__file__).parents[3])!r})\n"
        "from rlstreams.streams.process import owner\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "owner.when_gone(lambda: (folder / 'heard').touch())\n"
        "read = sys.stdin.read() + subprocess.run(['cat'], capture_output=True, text=True).stdout\n"
        "(folder / f'up{read}').touch()\n"
        "while not (folder / 'heard').exists(): time.sleep(0.01)\n"
        "(folder / 'drained').touch()\n"
    )
    owner, _, _ = owned(Orphaned.DRAINS, script)
    until((tmp_path / "up").exists, "it is up, and has read nothing")
    assert not (tmp_path / "heard").exists()
    owner.kill()
    owner.wait()
    until((tmp_path / "drained").exists, "it drained")


@pytest.mark.parametrize("orphaned", Orphaned)
def test_what_cannot_be_started_is_an_error(orphaned: Orphaned) -> None:
    fds = sorted(os.listdir("/dev/fd"))
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        Child.started(["/no/such/program", "x"], orphaned=orphaned)
    assert fds == sorted(os.listdir("/dev/fd"))


@pytest.mark.parametrize("orphaned", Orphaned)
def test_it_gets_the_descriptors_environment_and_umask_that_are_given(
    orphaned: Orphaned, tmp_path: Path, children: list[Child]
) -> None:
    """And holds no other; its reaper holds none of them, so a closed end is seen."""
    theirs, ours = os.pipe()
    log = tmp_path / "log"
    script = (
        f"import os, time; os.close({ours})\n"
        f"print(os.environ['A'], os.umask(0), os.path.exists('/dev/fd/{theirs}'), flush=True)\n"
        "time.sleep(3600)"
    )
    child = Child.started(
        [sys.executable, "-S", "-c", script], orphaned=orphaned, log=log,
        environment={"A": "b"}, pass_fds=[ours], umask=0o077,
    )  # fmt: skip
    children.append(child)
    os.close(ours)
    assert select.select([theirs], [], [], DEADLINE_S)[0], "nobody holds the other end"
    assert b"" == os.read(theirs, 1)
    until(child.log_tail, "it is up")
    assert ["b 63 False"] == list(child.log_tail())
    os.close(theirs)


def test_a_program_that_ends_at_once_is_seen_to_end() -> None:
    """Before its reaper listens for ends: 16 of 60 such programs were waited for, for ever."""
    for _ in range(12):
        child = Child.started(["true"], orphaned=Orphaned.DIES)
        assert child.wait(DEADLINE_S / 3)
        assert 0 == child.poll()
