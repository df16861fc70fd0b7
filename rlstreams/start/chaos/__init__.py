"""Faults on purpose: a seeded plan, its execution on a run of `up`, and a report of the outcome."""
