"""A process between a child and its owner: with the owner it ends all that the child started.

    python -I -S reaper.py REPORT,FD... PROGRAM ARGUMENT...

It adopts every process below it that loses its parent (`PR_SET_CHILD_SUBREAPER`), so no process
that the program starts gets away: neither by a session of its own, nor by a cleared environment,
nor by a double fork. When PROGRAM ends, or standard input closes (`Child`: the owner let go, or is
gone), it kills all of them, and ends as PROGRAM did. It writes `PID 0` to REPORT, or `0 ERRNO`
where PROGRAM cannot be started; the other descriptors are PROGRAM's. It imports no module of ours,
so that it starts with 30 ms of CPU.

Other systems than Linux have no such adoption, and without /proc it does not see what it adopted:
there, processes that left the program's process group stay.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time

LIMIT_S = 8.0  # longest wait for a process that SIGKILL does not end: its device or disk hangs
_AGAIN_S = 0.002
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_IS_LINUX = sys.platform == "linux"
_SEES_ALL = _IS_LINUX and os.path.exists("/proc/self/stat")  # not in a container without it


def main(fds: list[int], command: list[str]) -> None:
    """Start `command`, stay until it or the owner is gone, end all others; never returns."""
    report, *theirs = fds
    if _IS_LINUX and _prctl(_PR_SET_CHILD_SUBREAPER, 1):
        sys.stderr.write("reaper: the system lets no process adopt orphans: some may stay\n")
        sys.stderr.flush()
    elif _IS_LINUX and not _SEES_ALL:
        sys.stderr.write(
            "reaper: /proc does not show this process: what it starts in a session of its own may "
            "stay when it ends\n"
        )
        sys.stderr.flush()
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        # Until the child runs another program, it holds a pipe's end for an error of this one.
        pid = _start(command, report)
    except OSError as err:
        os.write(report, f"0 {err.errno}\n".encode())
        os._exit(1)
    for fd in theirs:
        os.close(fd)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _frame: _send(pid, number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    os.write(wake, b"\0")  # a program that ended before the handler was set sends no more signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    os.write(report, f"{pid} 0\n".encode())
    os.close(report)
    status = _stay(pid, woken)
    os.set_blocking(wake, True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _end_as(_end_all(pid, status))


def _start(command: list[str], report: int) -> int:
    """Start the program; return its process id, once it runs.

    Raises:
        OSError: the program is not there, or the system has no room.
    """
    failed, fail = os.pipe()  # both close when another program begins
    if pid := os.fork():
        os.close(fail)
        number = os.read(failed, 16)
        os.close(failed)
        if number:
            raise OSError(int(number), "")
        return pid
    try:
        os.close(report)
        os.setsid()
        if _IS_LINUX:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for sent in (
            signal.SIGPIPE,
            signal.SIGXFSZ,
        ):  # which Python ignores, and a program inherits
            signal.signal(sent, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        os.execvp(command[0], command)
    except OSError as err:
        os.write(fail, str(err.errno).encode())
    finally:
        os._exit(127)


def _stay(pid: int, woken: int) -> int | None:
    """Wait; return the program's wait status once it has ended, or None once the owner let go."""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
            if (status := _reap(pid)) is not None:
                return status
        if 0 in ready and not os.read(0, 1):
            return None


def _reap(pid: int) -> int | None:
    """Collect ended children; return the program's wait status, if it is among them.

    Raises:
        ChildProcessError: no child is left.
    """
    found = None
    while (one := os.waitpid(-1, os.WNOHANG))[0]:
        if one[0] == pid:
            found = one[1]
        if found is not None:
            break
    return found


def _end_all(pid: int, status: int | None) -> int:
    """Kill all descendants until none is left; return the program's wait status."""
    until_s = time.monotonic() + LIMIT_S
    if not _SEES_ALL:
        _send(pid, signal.SIGKILL)
    while time.monotonic() < until_s:
        for left in _descendants() if _SEES_ALL else ():
            try:
                os.kill(left, signal.SIGKILL)
            except OSError:  # gone, or another user's
                continue
        try:
            while (ended := _reap(pid)) is not None:
                status = ended
        except ChildProcessError:
            break
        if status is not None and not _SEES_ALL:
            break  # what is left cannot be named
        time.sleep(_AGAIN_S)
    return signal.SIGKILL if status is None else status


def _descendants() -> list[int]:
    """Return the process ids of this process's descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # gone meanwhile
                continue
            children.setdefault(int(fields[1]), []).append(int(name))
    found, left = [], [os.getpid()]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def _send(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except OSError:  # gone
        return


def _end_as(status: int) -> None:
    """End with the same exit status, or by the same signal; only the program leaves a core."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0))


if __name__ == "__main__":
    main([int(fd) for fd in sys.argv[1].split(",")], sys.argv[2:])
