"""Which step broke a run, and which samples of it: from the log alone."""

KINDS = ("group", "row", "agent", "worker", "host", "reward")
"""What can make a set of samples to blame."""
