"""What a run looks like in a terminal."""
