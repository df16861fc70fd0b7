"""Wording of what the log holds: tokens, texts, numbers, times, one sample stage by stage."""
