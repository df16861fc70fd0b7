"""The loop that all roles share (poll, hand over, commit) and its safeguards."""
