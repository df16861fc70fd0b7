"""Doing committed steps again: redo, and what retention leaves of their records."""
