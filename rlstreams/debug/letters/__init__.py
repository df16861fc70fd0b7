"""What operators do with dead letters: list them, look at one, ask for their groups again."""
