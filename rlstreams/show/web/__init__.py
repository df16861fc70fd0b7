"""The live page of runs: one process that reads their logs, and disturbs nothing."""
