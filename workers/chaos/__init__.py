"""Faults on purpose: a seeded plan, its execution on a run of `up`, and what the log says of it."""
