"""`rlstreams replay ACTION`: recordings played, steps and scores redone, runs branched."""

from rlstreams.cli.replay import recordings, runs, steps
from rlstreams.cli.replay.group import REPLAY

__all__ = ["REPLAY", "recordings", "runs", "steps"]
