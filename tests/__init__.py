"""Tests, from pure functions to whole runs."""
