"""Settings of a server's adapter: limits and deadlines, from the section `[engine]`."""

from __future__ import annotations

from dataclasses import dataclass

from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.facts import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSettings:
    """Limits of requests and deadlines of calls; all times in seconds."""

    kind: Kind
    limit: int  # requests in flight per server, at most
    adapts: bool = False  # the limit follows its gauges: see `Capacity`
    capture_experts: bool
    on_pull: PauseMode  # treatment of running requests while weights change
    keep_cache: bool  # with KEEP: go on with old keys and values, or compute them again
    pull_s: float  # longest pull
    request_s: float  # longest request
    answer_s: float = 30.0  # longest answer of a control route
    again_s: float = 1.0  # before an unanswered request is aborted once more
    start_s: float = 600.0  # longest start of a server
    beat_s: float = 1.0  # between two looks at a server
    look_s: float = 4.0  # longest answer to a look
    gauges_s: float = 2.0  # between two looks at a server's gauges
    inside_s: float = 5.0  # between two looks at the engine behind a server's front end
    silent_s: float = 20.0  # a server that answers no look for so long is given up
    change_s: float = 120.0  # longest time to free the GPU's memory, or to take it again
    allow_untested: bool = False  # use a version that these adapters were not run with
