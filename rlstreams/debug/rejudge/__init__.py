"""Recorded sessions judged again."""
