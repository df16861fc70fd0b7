"""A check of the doctor: its level, its finding, and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from rlstreams.streams.log.errors import BrokerError, StreamsError
from rlstreams.workers.config.run import RunConfig


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"  # a run works, but not as well as it could
    FAIL = "fail"  # a run would not start, or would not work


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check."""

    name: str
    level: Level
    found: str
    advice: str = ""  # what to do; empty where `found` says it, or nothing need be done


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The workers of this host: all that `up` starts, or one worker of one role."""

    role: str = ""  # "": all of them, with `up`
    ordinal: int | None = None  # of the role's worker; None: any of them may run here

    def has(self, *roles: str) -> bool:
        """Whether a worker of one of these roles runs here."""
        return not self.role or self.role in roles

    @property
    def is_alone(self) -> bool:
        """Whether its role is started by itself, without `up`."""
        return bool(self.role)

    def num_processes(self, config: RunConfig, role: str) -> int:
        """Processes of `role` that run here; of a role by itself one."""
        if not self.has(role):
            return 0
        if self.is_alone:
            return 1
        return config.num_servers if role == "server" else config.num_workers(role)


EVERYTHING = Host()


def ok(name: str, found: str) -> Check:
    """A check that passed."""
    return Check(name=name, level=Level.OK, found=found)


def warn(name: str, found: str, advice: str) -> Check:
    """A check whose finding does not keep a run from working."""
    return Check(name=name, level=Level.WARN, found=found, advice=advice)


def fail(name: str, found: str, advice: str) -> Check:
    """A check whose finding keeps a run from working."""
    return Check(name=name, level=Level.FAIL, found=found, advice=advice)


def probed(
    name: str, probe: Callable[[], Check | Iterable[Check] | None], advice: str = ""
) -> list[Check]:
    """Checks of `probe`, up to an error of ours, which becomes a failed check."""
    checks: list[Check] = []
    try:
        found = probe()
        for check in [found] if isinstance(found, Check) else found or ():
            checks.append(check)  # not `extend`: those before an error count
    except StreamsError as err:
        is_away = isinstance(err, BrokerError)
        cure = "start the broker, or correct broker.bootstrap" if is_away else ""
        checks.append(fail(name, str(err), advice or cure))
    return checks
