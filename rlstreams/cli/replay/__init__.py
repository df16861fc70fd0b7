"""`rlstreams replay ACTION`: a recording played, work done again, a run from a step on."""

from rlstreams.cli.replay import recordings, runs, steps
from rlstreams.cli.replay.group import REPLAY

__all__ = ["REPLAY", "recordings", "runs", "steps"]
