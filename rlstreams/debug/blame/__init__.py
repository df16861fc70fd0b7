"""The search for the step that broke a run, and for its samples to blame: from the log alone."""

KINDS = ("group", "row", "agent", "worker", "host", "reward")
"""Facts of a sample that samples are put into sets by."""
