"""Identity, configuration and bus of a worker, given to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlstreams.schemas.events import WorkerReport
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.rights import OfRole
from rlstreams.streams.log.roles import ROLES
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.log import Log, get

NO_ORDINAL = -1  # of a process that joins, before it has a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Identity and dependencies of one worker process."""

    config: RunConfig
    bus: Bus  # restricted to the rights in the table of topics
    role: str  # one of `ROLES`
    ordinal: int
    instance: str  # unique per process
    server_urls: Sequence[str] = ()  # of all model servers of the run, as `up` chose them
    takeover: bool = False  # the operator vouches that the run's owner is dead: no lease watch
    reaped: frozenset[str] = frozenset()  # instances of this worker that the supervisor saw end
    claims_after: int | None = None  # claims above this epoch are of our supervisor's trainers
    is_joined: bool = False  # its configuration is that of the claim that it found
    files: Mapping[str, str] = field(default_factory=dict)  # `agreement.files_of`, at the start
    beat: Callable[[], None] = lambda: None  # reports progress within a long tick
    # Takes each report, and the worker's other figures of its load (`workers.loop.health`).
    on_report: Callable[[WorkerReport, Mapping[str, object]], None] = lambda report, load: None

    def __post_init__(self) -> None:
        if self.role in ROLES and not isinstance(self.bus, OfRole):
            object.__setattr__(self, "bus", OfRole(self.bus, self.role))

    @property
    def worker(self) -> str:
        """`{role}-{ordinal}`: the same across restarts."""
        if self.ordinal == NO_ORDINAL:
            return f"{self.role} (joining)"
        return f"{self.role}-{self.ordinal}"

    @property
    def place(self) -> int:
        """Place among the workers of its configuration; a joined one is the first of its own."""
        return 0 if self.is_joined else self.ordinal

    @property
    def transactional_id(self) -> str:
        """`{role}.{ordinal}`: fixed, so that a restart settles its predecessor's transaction."""
        return f"{self.role}.{self.ordinal}"

    @property
    def log(self) -> Log:
        """This process's log; raises ConfigError if `RLSTREAMS_LOG` is no level."""
        return get(self.role, self.worker, self.instance)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.folder)
