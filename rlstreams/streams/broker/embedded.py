"""A real Apache Kafka broker, one node, that outlives the process that started it.

The lock shows that the broker lives: it is taken before the folder is touched and handed down to
the broker's process, so it is held exactly as long as that process lives. Kafka's own lock comes
too late: a second broker on the same folder breaks the first before it fails. The log survives the
kill of any process; a power cut only with `broker.config.FSYNC`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

from rlstreams.streams.broker.class_archive import ClassArchive
from rlstreams.streams.broker.config import (
    CLEAN,
    DISK_FULL,
    ENVIRONMENT,
    FENCED,
    FOR_A_LOOK,
    HOST,
    OUT_OF_SYNC,
    STARTED,
    fence_properties,
    java_command,
    java_logging,
    log4j2,
    new_cluster_id,
    server_properties,
)
from rlstreams.streams.broker.identity import META, damaged_checkpoint, keep_identity
from rlstreams.streams.broker.jars import classpath
from rlstreams.streams.broker.java import find_java
from rlstreams.streams.broker.password import broker_settings, controller_settings, make_password
from rlstreams.streams.broker.ports import answers, free_port, is_free
from rlstreams.streams.log.errors import BrokerError, ConfigError, DeadlineError
from rlstreams.streams.log.owner_lock import OwnedError, held, is_held
from rlstreams.streams.log.text import tail
from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.streams.synced import write_whole

START_S = 90.0
FENCE_S = 20.0  # a controller alone starts in 2 to 4 s and fences after 1 s
STOP_S = 15.0
TAKE_S = 2.0  # a process that checks whether the lock is held has it for a moment
_LOOKED_AT = 1 << 16  # bytes at the end of a log that are searched each second
# Python would warn about a child without a reference, which rightly goes on living.
_CHILDREN: list[Child] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerState:
    """Content of `broker.json`; true while the lock is held."""

    pid: int  # 0: not started yet
    port: int
    controller_port: int
    cluster_id: str
    host: str = HOST

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients."""
        return f"{self.host}:{self.port}"


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


class EmbeddedBroker:
    """The broker of one data folder; any number of these objects may refer to the same one."""

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        jars_dir: str = "",
        heap_mb: int = 256,
        settings: Mapping[str, str] = MappingProxyType({}),  # broker properties beside ours
        *,
        host: str = HOST,  # any other host than loopback makes it ask for a password
        has_password: bool = False,  # a password in the folder makes it ask as well
        is_for_a_look: bool = False,
    ) -> None:
        self.folder = folder
        self._lock = folder / "broker.lock"
        self._host = host
        self._port = port
        self._jars_dir = jars_dir
        self._data = folder / "data"
        self._settings = folder / "server.properties"
        self._log = folder / "server.log"
        self._output = folder / "jvm.out"
        self._heap_mb = heap_mb
        self._extra = dict(settings)
        self._child: Child | None = None
        self._log_start = 0  # byte at which the log of the broker that this object started begins
        self._has_password = has_password or host != HOST
        self._java_options = FOR_A_LOOK if is_for_a_look else ()

    def start(self) -> BrokerState:
        """Start and wait until it serves. Port 0: the folder's last port, or a free one.

        Raises:
            ConfigError: the folder is in use; names the process.
            BrokerError: the port is in use, a jar or Java is missing, or the broker ended at once;
                carries the last lines of its log.
            DeadlineError: not ready after 90 s; it was stopped.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked() as lock_fd:
            self._log_start = self._log.stat().st_size if self._log.is_file() else 0
            if self._has_password:
                make_password(self.folder)
                self.folder.chmod(0o700)
            state = self._next_state()
            self._write_state(state)
            program, jars = find_java(), classpath(self._jars_dir, _to_stderr)
            archive = ClassArchive(program, jars)
            options = (*self._java_options, *archive.options(self.folder))
            java = java_command(program, jars, self.folder, self._heap_mb, options)
            self._write_settings(state)
            keep_identity(self.folder, self._data)
            if not (self._data / META).is_file():
                self._format(java, state.cluster_id, lock_fd)
                keep_identity(self.folder, self._data)
            elif not (self._data / CLEAN).is_file():
                self._fence_dead(java, state, lock_fd)
            child = self._spawn(
                (*java, "kafka.Kafka", str(self._settings)), lock_fd, Orphaned.LIVES
            )
            self._child = child
            with _killed_on_error(child):
                state = replace(state, pid=child.pid)
                self._write_state(state)
        with _killed_on_error(child):
            self._await_ready(child)
        if maker := archive.making(self.folder):
            _CHILDREN.append(maker)
        return state

    def attach_or_start(self) -> BrokerState:
        """Return the living broker of this folder, else a new one. Raises as `start`."""
        deadline = time.monotonic() + START_S
        # A broker that does not answer still starts, or is dying: its starter was killed.
        while (state := self.status()) is not None and not answers(state.port, state.host):
            if time.monotonic() > deadline:
                raise DeadlineError(f"broker {state.pid}: nobody answers at {state.bootstrap}")
            time.sleep(0.05)
        return state or self.start()

    def status(self) -> BrokerState | None:
        """Return the living broker of this folder, or None."""
        _reap()
        state = self._read_state()
        if not (state and state.pid and is_held(self._lock)):
            return None
        return state if _is_alive(state.pid) else None  # None: a start has just taken the lock

    @property
    def last_status(self) -> int | None:
        """Exit status of this object's last broker (negative: a signal); None: alive, or none."""
        return None if self._child is None else self._child.poll()

    def coming(self, begin_s: float) -> BrokerState | None:
        """Return the living broker, or the one that another process starts; None: none is started.

        Args:
            begin_s: longest wait until such a start begins, in a folder that had a broker.

        Raises:
            DeadlineError: it was being started for 90 s and more.
        """
        begin = time.monotonic() + begin_s
        deadline = begin + START_S + FENCE_S
        while (state := self.status()) is None:
            is_starting = is_held(self._lock)
            if not is_starting and (time.monotonic() > begin or self._read_state() is None):
                return None
            if time.monotonic() > deadline:
                raise DeadlineError(f"a broker in {self.folder} has been starting for too long")
            time.sleep(0.05)
        return state

    def stop(self) -> bool:
        """Send SIGTERM, wait 15 s, then send SIGKILL; return False if none was running.

        Raises:
            DeadlineError: it lives on after SIGKILL (a hanging disk).
        """
        state = self.status()
        if state is None:
            return False
        os.kill(state.pid, signal.SIGTERM)
        if not self._is_gone():
            _to_stderr(f"broker {state.pid} ignored SIGTERM for {STOP_S:.0f} s, killing it")
            os.kill(state.pid, signal.SIGKILL)
            if not self._is_gone():
                raise DeadlineError(f"broker {state.pid} outlived SIGKILL by {STOP_S:.0f} s")
        return True

    def log_tail(self) -> str:
        """Return the last lines of the broker's log and of the JVM's own output."""
        return last_lines(self._log, self._output, num_lines=12)

    def died_of_full_disk(self) -> bool:
        """Whether the last started broker's log names a full disk: a restart is no cure."""
        return DISK_FULL in self._last_log()

    def lost_a_coordinator(self) -> bool:
        """Whether a group has no coordinator until this broker is started again."""
        return OUT_OF_SYNC in self._last_log(most=_LOOKED_AT)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            with held(self._lock, wait_s=TAKE_S) as fd:
                yield fd
        except OwnedError:
            state = self._read_state()
            owner = f"process {state.pid}" if state and state.pid else "a starting broker"
            raise ConfigError(
                f"data folder {self.folder} is in use by {owner}; stop it with "
                f"`rlstreams broker stop {shlex.quote(str(self.folder))}`, or choose another folder"
            ) from None

    def _is_gone(self) -> bool:
        """Whether the broker has ended, after at most `STOP_S`."""
        deadline = time.monotonic() + STOP_S
        while self.status() is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _next_state(self) -> BrokerState:
        """Return ports and cluster id for this start: the last start's, where they are free."""
        last = self._read_state()
        host = self._host
        port = self._port or (
            last.port if last and is_free(last.port, host) else free_port(host=host)
        )
        if not is_free(port, host):
            raise BrokerError(
                f"broker.port {port} is in use on {host} by another program; "
                "choose another one, or 0 for a free one"
            )
        keep = last is not None and last.controller_port != port and is_free(last.controller_port)
        return BrokerState(
            pid=0,
            port=port,
            controller_port=last.controller_port if last and keep else free_port(port),
            cluster_id=last.cluster_id if last else new_cluster_id(),
            host=host,
        )

    def _read_state(self) -> BrokerState | None:
        try:
            said = json.loads((self.folder / "broker.json").read_text("utf-8"))
            known = {field.name for field in fields(BrokerState)}
            return BrokerState(**{name: said[name] for name in known & said.keys()})
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
            return None  # not there, or emptied by a power cut: the data hold their cluster id

    def _write_state(self, state: BrokerState) -> None:
        write_whole(self.folder / "broker.json", f"{json.dumps(asdict(state))}\n".encode())

    def _write_settings(self, state: BrokerState) -> None:
        extra = {**broker_settings(self.folder), **self._extra}
        text = server_properties(self._data, state.port, state.controller_port, extra, state.host)
        self._settings.write_text(text, encoding="utf-8")
        (self.folder / "log4j2.xml").write_text(log4j2(), encoding="utf-8")

    def _format(self, java: tuple[str, ...], cluster_id: str, lock_fd: int) -> None:
        """Write `meta.properties`; Kafka writes it last, so its presence shows a whole format."""
        options = ("-t", cluster_id, "-c", str(self._settings), "--ignore-formatted")
        command = (*java, "kafka.tools.StorageTool", "format", *options)
        child = self._spawn(command, lock_fd, Orphaned.DIES)
        if not child.wait(START_S):
            child.end()
            raise DeadlineError(
                f"broker: formatting {self._data} took over {START_S:.0f} s:\n{self.log_tail()}"
            )
        if status := child.poll():
            raise BrokerError(
                f"broker: cannot format {self._data} (exit {status}):\n{self.log_tail()}"
            )

    def _fence_dead(self, java: tuple[str, ...], state: BrokerState, lock_fd: int) -> None:
        """Have a controller alone fence the broker that was killed here.

        Without that, the node starts from metadata that calls it the leader of everything, as
        before the kill. It loads its groups at once, and session timers that run out before it is
        elected anew fail for good: members that died keep their partitions for ever (Kafka 4.2.1; 1
        of 7 restarts that took 10 to 15 s, none of 8 that took 6 to 8 s).
        """
        settings, log, log4j = (
            self.folder / name for name in ("fence.properties", "fence.log", "fence-log4j2.xml")
        )
        extra = controller_settings(self.folder)
        text = fence_properties(self._data, state.controller_port, extra)
        settings.write_text(text, encoding="utf-8")
        log.write_text("", encoding="utf-8")
        log4j.write_text(log4j2(controller="INFO"), encoding="utf-8")
        command = (*java, *java_logging(log4j, log), "kafka.Kafka", str(settings))
        child = self._spawn(command, lock_fd, Orphaned.DIES)
        deadline = time.monotonic() + FENCE_S
        try:
            # No such line comes if an earlier start, killed in between, has fenced the broker.
            while FENCED not in log.read_text("utf-8", "replace") and time.monotonic() < deadline:
                if child.poll() is not None:
                    raise BrokerError(
                        f"broker: fencing the one that was killed ended (exit {child.poll()}):"
                        f"\n{last_lines(log, self._output)}"
                    )
                time.sleep(0.05)
        finally:
            child.end()

    def _spawn(self, command: tuple[str, ...], lock_fd: int, orphaned: Orphaned) -> Child:
        """Start the broker (`LIVES`) or a preparation of a start (`DIES`); both hold the lock."""
        with self._output.open("wb") as output:
            child = Child.started(
                command,
                orphaned=orphaned,
                stdout=output,
                stderr=subprocess.STDOUT,
                environment=ENVIRONMENT,
                umask=0o077,  # its segments are for their owner alone
                pass_fds=(lock_fd,),
            )
        _CHILDREN.append(child)
        return child

    def _await_ready(self, child: Child) -> None:
        deadline = time.monotonic() + START_S
        while STARTED not in self._last_log():
            if child.poll() is not None:
                raise BrokerError(
                    f"broker ended while starting (exit {child.poll()}): "
                    f"{damaged_checkpoint(self._last_log())}"
                    f"\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"broker {child.pid} was not ready after {START_S:.0f} s:\n{self.log_tail()}"
                )
            time.sleep(0.05)

    def _last_log(self, most: int = sys.maxsize) -> str:
        if not self._log.is_file():
            return ""
        with self._log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - most))
            return file.read().decode("utf-8", errors="replace")


@contextlib.contextmanager
def _killed_on_error(child: Child) -> Iterator[None]:
    """End the child on any error, Ctrl-C included: no other process knows of it yet."""
    try:
        yield
    except BaseException:
        child.end()
        raise


def _reap() -> None:
    """Collect ended children, which would stay as zombies."""
    _CHILDREN[:] = [child for child in _CHILDREN if child.poll() is None]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as err:
        return isinstance(err, PermissionError)  # a process of another user
    return True


def last_lines(*files: Path, num_lines: int = 12) -> str:
    """Return the last lines of each file that is there."""
    return "\n".join(line for file in files for line in tail(file, num_lines))
