"""Tools for dead letters: list them, look at one, ask for their groups again."""
