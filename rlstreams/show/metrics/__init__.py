"""Figures of a run for other programs, read from its log."""
