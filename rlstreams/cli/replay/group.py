"""What all actions of `rlstreams replay` share."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rlstreams.cli.options import Group

if TYPE_CHECKING:
    from rlstreams.cli.named import NamedRun
    from rlstreams.workers.config.run import RunConfig

REPLAY = Group(
    "replay",
    "a recording into a fresh run; work done again, and compared; a run that goes on from a step",
    was="run",
)


def config_of(found_run: NamedRun) -> RunConfig:
    """Of a run or a recording; what is wrong with that is said."""
    from rlstreams.workers.config.load import from_json

    for problem in found_run.log.problems:
        print(f"warning: {problem}", file=sys.stderr)
    return found_run.config or from_json(json.dumps(found_run.log.configuration))
