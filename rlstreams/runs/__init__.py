"""Runs that are there: found by name, and attached to."""
