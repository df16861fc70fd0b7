"""Trackers beside a run: each gets every row once, and none can hold up the run or another."""
